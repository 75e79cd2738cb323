use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Condvar, Mutex};

use super::*;
use crate::wire::{self, command, option};
use crate::{Extent, NbdError, Span};

const SIZE: u64 = 1 << 20;
/// No wait of these tests takes as long, unless something is never answered.
const LONG: Duration = Duration::from_secs(20);

/// Bytes in memory. What begins beyond the first half waits until it is let go.
#[derive(Debug)]
struct Bytes {
    bytes: Mutex<Vec<u8>>,
    open: Mutex<bool>,
    opened: Condvar,
    waits: Mutex<bool>,
    begun: Condvar,
    /// Reads come from it.
    file: Option<Arc<File>>,
    failed: AtomicBool,
}

impl Bytes {
    fn new() -> Arc<Self> {
        Self::with(None)
    }

    fn with(file: Option<Arc<File>>) -> Arc<Self> {
        let bytes = Mutex::new(vec![0; usize::try_from(SIZE).expect("small")]);
        Arc::new(Self {
            bytes,
            open: Mutex::new(false),
            opened: Condvar::new(),
            waits: Mutex::new(false),
            begun: Condvar::new(),
            file,
            failed: AtomicBool::new(false),
        })
    }

    fn until_one_waits(&self) {
        let waits = self.waits.lock().expect("lock");
        drop(self.begun.wait_while(waits, |waits| !*waits).expect("lock"));
    }

    fn open(&self) {
        *self.open.lock().expect("lock") = true;
        self.opened.notify_all();
    }
}

fn place(span: Span) -> std::ops::Range<usize> {
    let small = |bytes| usize::try_from(bytes).expect("small");
    small(span.offset_bytes)..small(span.end())
}

impl Target for Bytes {
    fn extents(&self, span: Span) -> Vec<Extent> {
        vec![Extent { len_bytes: u64::from(span.len_bytes), zero: false }]
    }

    fn is_quick(&self, command: &Command) -> bool {
        !matches!(command, Command::Read { span, .. } if span.offset_bytes >= SIZE / 2)
    }

    fn read(&self, span: Span, bytes: &mut [u8]) -> Result<(), NbdError> {
        assert_ne!(span.offset_bytes, 512, "made up");
        if span.offset_bytes >= SIZE / 2 {
            *self.waits.lock().expect("lock") = true;
            self.begun.notify_all();
            let open = self.open.lock().expect("lock");
            drop(self.opened.wait_while(open, |open| !*open).expect("lock"));
        }
        bytes.copy_from_slice(&self.bytes.lock().expect("lock")[place(span)]);
        Ok(())
    }

    fn files(&self, span: Span) -> Option<Vec<FilePart>> {
        let file = self.file.clone().filter(|_| !self.failed.load(Ordering::Relaxed))?;
        let Span { offset_bytes, len_bytes } = span;
        Some(vec![FilePart { file, offset_bytes, len_bytes: len_bytes as usize }])
    }

    fn file_failed(&self, _: &io::Error) {
        self.failed.store(true, Ordering::Relaxed);
    }

    fn change(&self, command: &Command, bytes: &[u8]) -> Result<(), NbdError> {
        match command {
            Command::Write { span, .. } => {
                self.bytes.lock().expect("lock")[place(*span)].copy_from_slice(bytes);
                Ok(())
            }
            Command::Trim { .. } => Err(NbdError::NoSpace),
            _ => Ok(()),
        }
    }
}

#[derive(Debug)]
struct One(Arc<Bytes>);

impl Exports for One {
    fn list(&self) -> Vec<Export> {
        vec![Export {
            name: "x".to_owned(),
            description: String::new(),
            size_bytes: SIZE,
            read_only: false,
            flushes: true,
        }]
    }

    fn claim(&self, export: &Export) -> Option<Arc<dyn Target>> {
        assert_eq!(export.name, "x");
        let target = Arc::clone(&self.0);
        Some(target)
    }
}

struct Client {
    socket: UnixStream,
    ended: Receiver<Result<(), ServeError>>,
    pulse: Arc<Pulse>,
}

impl Client {
    /// Without a handshake.
    fn new(target: &Arc<Bytes>) -> Self {
        let (socket, theirs) = UnixStream::pair().expect("sockets");
        socket.set_read_timeout(Some(LONG)).expect("a timeout");
        let pulse = Arc::new(Pulse::new().expect("a bell"));
        let (theirs_too, exports) = (Arc::clone(&pulse), One(Arc::clone(target)));
        let (tell, ended) = channel();
        std::thread::spawn(move || {
            let outcome = serve(&theirs, &exports, &theirs_too);
            drop(theirs);
            theirs_too.end();
            let _gone = tell.send(outcome);
        });
        Self { socket, ended, pulse }
    }

    /// With simple replies.
    fn connected(target: &Arc<Bytes>) -> Self {
        let mut client = Self::new(target);
        let mut greeting = [0; 18];
        client.socket.read_exact(&mut greeting).expect("a greeting");
        client.say(&3_u32.to_be_bytes());
        let head = [&wire::IHAVEOPT.to_be_bytes()[..], &option::EXPORT_NAME.to_be_bytes()];
        client.say(&[&head.concat()[..], &1_u32.to_be_bytes(), b"x"].concat());
        let mut told = [0; 10];
        client.socket.read_exact(&mut told).expect("an export");
        assert_eq!(told[..8], SIZE.to_be_bytes());
        client
    }

    fn say(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("it reads");
    }

    fn ask(&mut self, command: u16, cookie: u64, span: (u64, u32), payload: &[u8]) {
        let head = [
            &0x2560_9513_u32.to_be_bytes()[..],
            &[0, 0],
            &command.to_be_bytes(),
            &cookie.to_be_bytes(),
            &span.0.to_be_bytes(),
            &span.1.to_be_bytes(),
            payload,
        ];
        self.say(&head.concat());
    }

    /// → error and cookie.
    fn answer(&mut self, bytes: &mut [u8]) -> (u32, u64) {
        let mut head = [0; 16];
        self.socket.read_exact(&mut head).expect("an answer");
        let error = u32::from_be_bytes(head[4..8].try_into().expect("four"));
        if error == 0 {
            self.socket.read_exact(bytes).expect("its bytes");
        }
        (error, u64::from_be_bytes(head[8..].try_into().expect("eight")))
    }

    fn outcome(&self) -> Result<(), ServeError> {
        self.ended.recv_timeout(LONG).expect("it has ended")
    }
}

#[test]
fn what_is_written_is_read_and_what_fails_says_why() {
    let target = Bytes::new();
    let mut client = Client::connected(&target);
    client.ask(command::WRITE, 1, (4096, 512), &[7; 512]);
    assert_eq!(client.answer(&mut []), (0, 1));
    client.ask(command::READ, 2, (4096, 1024), &[]);
    let mut bytes = [0; 1024];
    assert_eq!(client.answer(&mut bytes), (0, 2));
    assert_eq!((bytes[0], bytes[511], bytes[512]), (7, 7, 0));
    client.ask(command::FLUSH, 3, (0, 0), &[]);
    assert_eq!(client.answer(&mut []), (0, 3));
    client.ask(command::TRIM, 4, (0, 512), &[]);
    assert_eq!(client.answer(&mut []), (28, 4));
    client.ask(command::READ, 5, (SIZE, 512), &[]);
    assert_eq!(client.answer(&mut []), (22, 5));
    client.ask(command::DISC, 6, (0, 0), &[]);
    client.outcome().expect("as it wished");
}

#[test]
fn a_request_that_waits_delays_no_other_and_the_end_waits_for_it() {
    let target = Bytes::new();
    let mut client = Client::connected(&target);
    for cookie in 0..20 {
        client.ask(command::READ, cookie, (SIZE / 2 + cookie * 512, 512), &[]);
    }
    client.ask(command::READ, 99, (0, 512), &[]);
    assert_eq!(client.answer(&mut [0; 512]), (0, 99));
    target.open();
    let mut cookies: Vec<u64> = (0..20).map(|_| client.answer(&mut [0; 512]).1).collect();
    cookies.sort_unstable();
    assert!(cookies.into_iter().eq(0..20));

    let target = Bytes::new();
    let mut client = Client::connected(&target);
    client.ask(command::READ, 1, (SIZE / 2, 512), &[]);
    target.until_one_waits();
    assert!(client.pulse.ping(Instant::now() + LONG), "alive while a request waits");
    client.pulse.stop();
    let soon = client.ended.recv_timeout(Duration::from_millis(50));
    assert!(matches!(soon, Err(RecvTimeoutError::Timeout)), "its worker still reads: {soon:?}");
    target.open();
    client.outcome().expect("stopped");
    assert!(client.pulse.ping(Instant::now() + LONG), "an ended one is no obstacle");
}

#[test]
fn a_panic_fails_its_request_alone() {
    let target = Bytes::new();
    let mut client = Client::connected(&target);
    client.ask(command::READ, 1, (512, 512), &[]);
    assert_eq!(client.answer(&mut []), (5, 1));
    client.ask(command::READ, 2, (0, 512), &[]);
    assert_eq!(client.answer(&mut [0; 512]), (0, 2));
}

#[test]
fn a_client_that_takes_no_replies_is_not_read_any_more_and_gets_all_of_them_later() {
    let target = Bytes::new();
    let mut client = Client::connected(&target);
    let (len, count) = (1 << 20, 100_u64);
    // More replies than the server keeps; the requests themselves fit into the socket.
    for cookie in 0..count {
        client.ask(command::READ, cookie, (0, len), &[]);
    }
    // Its thread is done with what it takes when it answers.
    assert!(client.pulse.ping(Instant::now() + LONG));
    let mut bytes = vec![0; len as usize];
    let mut left: BTreeMap<u64, ()> = (0..count).map(|cookie| (cookie, ())).collect();
    for _ in 0..count {
        let (error, cookie) = client.answer(&mut bytes);
        assert_eq!(error, 0);
        left.remove(&cookie).expect("once");
    }
}

/// A file in memory in which each 512 bytes have their number.
fn numbered(len: u64) -> Arc<File> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::memfd_create("bytes", flags).expect("a file"));
    for sector in 0..len / 512 {
        file.write_all(&[sector.to_le_bytes(); 64].concat()).expect("written");
    }
    Arc::new(file)
}

#[test]
fn bytes_of_files_come_in_order_with_others_however_slowly_they_are_taken() {
    let target = Bytes::with(Some(numbered(SIZE)));
    target.open();
    let mut client = Client::connected(&target);
    // Some are answered by workers: those of the second half.
    let span = |cookie: u64| (cookie * 37 % 40 * 16384, 256 << 10);
    for cookie in 0..40 {
        client.ask(command::READ, cookie, span(cookie), &[]);
        client.ask(command::WRITE, 100 + cookie, (0, 512), &[1; 512]);
    }
    let mut bytes = vec![0; 256 << 10];
    for _ in 0..80 {
        let mut head = [0; 16];
        client.socket.read_exact(&mut head).expect("an answer");
        let cookie = u64::from_be_bytes(head[8..].try_into().expect("eight"));
        if cookie < 100 {
            client.socket.read_exact(&mut bytes).expect("its bytes");
            for (number, sector) in bytes.chunks_exact(512).enumerate() {
                let expected = span(cookie).0 / 512 + number as u64;
                assert_eq!(sector[504..], expected.to_le_bytes(), "{cookie}");
            }
        }
    }
}

#[test]
fn a_file_that_can_not_be_sent_ends_the_connection_and_is_read_from_then_on() {
    let target = Bytes::with(Some(numbered(8192)));
    let mut client = Client::connected(&target);
    client.ask(command::READ, 1, (4096, 8192), &[]);
    assert!(matches!(client.outcome(), Err(ServeError::Socket(_))));
    // As on a new connection.
    let mut client = Client::connected(&target);
    client.ask(command::READ, 1, (4096, 8192), &[]);
    assert_eq!(client.answer(&mut [0; 8192]), (0, 1));
}

#[test]
fn a_client_that_breaks_the_protocol_or_goes_ends_its_connection() {
    let target = Bytes::new();
    let mut client = Client::new(&target);
    client.say(&[0xff; 64]);
    assert!(matches!(client.outcome(), Err(ServeError::Protocol(_))));
    let mut client = Client::connected(&target);
    client.say(&[0; 28]);
    assert!(matches!(client.outcome(), Err(ServeError::Protocol(Flaw::RequestMagic))));
    let client = Client::connected(&target);
    client.socket.shutdown(std::net::Shutdown::Both).expect("closed");
    assert!(matches!(client.outcome(), Ok(()) | Err(ServeError::Socket(_))));
}
