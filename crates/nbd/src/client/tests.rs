use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;

use super::*;
use crate::{Exports, Pulse, Target, serve};

const SIZE: u64 = 4 << 20;

/// Bytes in memory. Those that were never written are told as zeros.
#[derive(Debug)]
struct Memory(Mutex<Vec<u8>>, Option<Mutex<mpsc::Receiver<()>>>);

impl Memory {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(vec![0; usize::try_from(SIZE).expect("small")]), None))
    }

    /// Reads wait until what is returned is dropped.
    fn mute() -> (Arc<Self>, mpsc::Sender<()>) {
        let (until, waits) = mpsc::channel();
        (Arc::new(Self(Mutex::new(vec![1; 1 << 13]), Some(Mutex::new(waits)))), until)
    }

    fn with<T>(&self, span: Span, then: impl FnOnce(&mut [u8]) -> T) -> T {
        let at = usize::try_from(span.offset_bytes).expect("small");
        then(&mut self.0.lock().expect("a test")[at..at + span.len_bytes as usize])
    }
}

impl Target for Memory {
    fn extents(&self, span: Span) -> Vec<Extent> {
        let zero = |piece: &[u8]| piece.iter().all(|byte| *byte == 0);
        self.with(span, |bytes| {
            let pieces = bytes.chunks(512);
            pieces
                .map(|piece| Extent { len_bytes: piece.len() as u64, zero: zero(piece) })
                .collect()
        })
    }

    fn is_quick(&self, command: &Command) -> bool {
        !matches!(command, Command::Read { span, .. } if span.offset_bytes >= SIZE / 2)
    }

    fn read(&self, span: Span, bytes: &mut [u8]) -> Result<(), NbdError> {
        if let Some(waits) = &self.1 {
            let _dropped = waits.lock().expect("a test").recv();
        }
        if span.offset_bytes == SIZE - 512 {
            return Err(NbdError::NoSpace);
        }
        self.with(span, |of| bytes.copy_from_slice(of));
        Ok(())
    }

    fn change(&self, command: &Command, bytes: &[u8]) -> Result<(), NbdError> {
        match *command {
            Command::Write { span, .. } => self.with(span, |of| of.copy_from_slice(bytes)),
            Command::Trim { span, .. } | Command::WriteZeroes { span, .. } => {
                self.with(span, |of| of.fill(0));
            }
            _ => {}
        }
        Ok(())
    }
}

#[derive(Debug)]
struct One(Arc<Memory>, Export);

impl Exports for One {
    fn list(&self) -> Vec<Export> {
        vec![self.1.clone()]
    }

    fn claim(&self, _export: &Export) -> Option<Arc<dyn Target>> {
        Some(Arc::<Memory>::clone(&self.0))
    }
}

fn export() -> Export {
    let (name, description) = ("it".to_owned(), "the first".to_owned());
    Export { name, description, size_bytes: SIZE, read_only: false, flushes: true }
}

/// A server's end of a new connection.
fn served(memory: &Arc<Memory>, export: Export) -> (UnixStream, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let exports = One(Arc::clone(memory), export);
    let thread = std::thread::spawn(move || {
        let pulse = Pulse::new().expect("a pulse");
        let _ended = serve(&theirs, &exports, &pulse);
    });
    (ours, thread)
}

fn refused() -> io::Error {
    io::ErrorKind::PermissionDenied.into()
}

/// Connects once.
fn once(socket: UnixStream) -> Connect {
    let mut socket = Some(socket);
    Box::new(move || socket.take().ok_or_else(refused))
}

fn span(offset_bytes: u64, len_bytes: u32) -> Span {
    Span { offset_bytes, len_bytes }
}

#[test]
fn what_was_written_is_read_in_any_pieces_and_told_as_data() {
    let memory = Memory::new();
    let (socket, server) = served(&memory, export());
    let client = Client::start(once(socket), "it").expect("a client");
    assert_eq!(client.export(), &export());
    let written: Vec<u8> = (0..3 << 19).map(|number: u32| number.to_le_bytes()[1] | 1).collect();
    let write = |at, bytes: &[u8]| {
        let span = span(at, u32::try_from(bytes.len()).expect("small"));
        client.wait_for(Command::Write { span, durable: true }, bytes.to_vec()).expect("written")
    };
    write(SIZE / 4, &written);
    write(SIZE / 2 + (1 << 20), &[7; 1024]);
    client.wait_for(Command::Flush, Vec::new()).expect("flushed");
    let trimmed = span(SIZE / 4 + 512, 1024);
    let trim = Command::Trim { span: trimmed, durable: false };
    client.wait_for(trim, Vec::new()).expect("trimmed");

    // More than one request's worth, with holes and data, from both of the server's ways to read.
    let mut all = vec![1; usize::try_from(SIZE).expect("small") - 512];
    client.read(0, &mut all).expect("all but the last");
    assert_eq!(all, memory.0.lock().expect("a test")[..all.len()]);
    let command = Command::BlockStatus { span: span(SIZE / 4, 2048), one: false };
    let told = client.wait_for(command, Vec::new()).expect("told").extents;
    let told: Vec<_> = told.iter().map(|extent| (extent.len_bytes, extent.zero)).collect();
    assert_eq!(told, [(512, false), (512, true), (512, true), (512, false)]);

    // An error is that request's alone. Zeros are not read at all.
    memory.with(span(SIZE - 512, 512), |bytes| bytes.fill(1));
    let mut last = [0; 512];
    assert_eq!(client.read(SIZE - 512, &mut last), Err(NbdError::NoSpace));
    assert_eq!(client.read(SIZE, &mut last), Err(NbdError::Invalid));
    assert_eq!(client.read(0, &mut last), Ok(()));
    drop(client);
    server.join().expect("the server ends with its client");
}

#[test]
fn requests_wait_for_a_server_that_comes_back() {
    let memory = Memory::new();
    memory.with(span(4096, 512), |bytes| bytes.fill(9));
    // The first server greets, and answers nothing.
    let (silent, _until) = Memory::mute();
    let (first, _server) = served(&silent, export());
    let mute = first.try_clone().expect("a clone");
    let tries = Arc::new(AtomicUsize::new(0));
    let (counted, of) = (Arc::clone(&tries), Arc::clone(&memory));
    let mut first = Some(first);
    let connect: Connect = Box::new(move || match first.take() {
        Some(first) => Ok(first),
        None if counted.fetch_add(1, Ordering::SeqCst) < 2 => {
            Err(io::ErrorKind::ConnectionRefused.into())
        }
        None => Ok(served(&of, export()).0),
    });
    let client = Client::start(connect, "it").expect("a client");
    let (tell, told) = mpsc::channel();
    for _ in 0..8 {
        let tell = tell.clone();
        let done = move |answer| drop(tell.send(answer));
        let command = Command::Read { span: span(4096, 512), whole: false };
        client.ask(command, Vec::new(), Box::new(done));
    }
    mute.shutdown(Shutdown::Both).expect("it goes");
    for _ in 0..8 {
        let answer = told.recv_timeout(Duration::from_secs(20)).expect("it is answered");
        assert_eq!(answer.expect("read").bytes, [9; 512]);
    }
    assert_eq!(tries.load(Ordering::SeqCst), 3);
}

#[test]
fn another_export_or_none_ends_all_requests() {
    let smaller = Export { size_bytes: SIZE / 2, ..export() };
    let replaced = Export { description: "the second".to_owned(), ..export() };
    for other in [Some(smaller), Some(replaced), None] {
        let is_replaced = other.is_some();
        let memory = Memory::new();
        let (socket, _server) = served(&memory, export());
        let kept = socket.try_clone().expect("a clone");
        let mut first = Some(socket);
        let connect: Connect = Box::new(move || match (first.take(), &other) {
            (Some(first), _) => Ok(first),
            (None, Some(other)) => Ok(served(&Memory::new(), other.clone()).0),
            (None, None) => Err(refused()),
        });
        let client = Client::start(connect, "it").expect("a client");
        kept.shutdown(Shutdown::Both).expect("it goes");
        let mut bytes = [0; 512];
        assert_eq!(client.read(0, &mut bytes), Err(NbdError::Shutdown));
        assert_eq!(client.read(0, &mut bytes), Err(NbdError::Shutdown));
        assert_eq!(client.is_replaced(), is_replaced);
    }
}

#[test]
fn there_is_no_client_of_what_is_not_there() {
    let (socket, _server) = served(&Memory::new(), export());
    let error = Client::start(once(socket), "other").expect_err("no such export");
    assert!(matches!(error, ClientError::Greeting(GreetError::Export { .. })), "{error:?}");
    let error = Client::start(Box::new(|| Err(refused())), "it").expect_err("no server");
    assert!(matches!(error, ClientError::Connect(_)), "{error:?}");
    let (socket, mut other) = UnixStream::pair().expect("a pair");
    other.write_all(b"SSH-2.0-OpenSSH_9.2p1 Debian").expect("said");
    let error = Client::start(once(socket), "it").expect_err("no NBD");
    assert!(matches!(error, ClientError::Greeting(GreetError::Style)), "{error:?}");
}

proptest! {
    /// A reply's head, and then anything: each request is answered, and bytes are never taken for
    /// an answer that is not whole.
    #[test]
    fn whatever_a_server_says_is_an_answer_or_the_end(
        said in proptest::collection::vec(any::<u8>(), 0..200),
        kinds in proptest::collection::vec((0..7_u16, 0..40_u32, any::<bool>()), 0..6),
    ) {
        let mut bytes = Vec::new();
        for (kind, len, done) in kinds {
            let kind = if kind == 6 { (1 << 15) + 1 } else { kind };
            bytes.extend(crate::wire::chunk_head(u16::from(done), kind, 0, len));
            bytes.extend(said.iter().take(len as usize));
        }
        bytes.extend(&said);
        let command = Command::Read { span: span(0, 512), whole: false };
        let (mut got, mut from) = (Got::of(&command), &bytes[..]);
        let ended = loop {
            let Ok(head) = replies::head(&mut from) else { break None };
            match got.take(&head, &mut from) {
                Ok(Part::More) => {}
                Ok(Part::Last(result)) => break Some(result),
                Err(_) => break None,
            }
        };
        if let Some(Ok(answer)) = ended {
            prop_assert_eq!(answer.bytes.len(), 512);
        }
    }
}
