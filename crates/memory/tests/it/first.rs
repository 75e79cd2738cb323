//! A page of another host that a VM waits for, before its neighbours.

use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use vmfork_engine::{Engine, EngineEvent, EngineOptions, HostImage, StoredRun};
use vmfork_image::{BLOCK_PAGES, ImageId, Origin, PageIdx, PageRange, PageSource};

use crate::common::{clone_of, needs_userfaultfd};

const SECONDS: Duration = Duration::from_secs(20);
const PAGES: u64 = BLOCK_PAGES;
/// A page that cannot be read.
const LOST: PageIdx = PageIdx(200);

/// How far a test has come, for threads that wait for it.
#[derive(Debug, Default)]
struct Stage(Mutex<u32>, Condvar);

impl Stage {
    fn reached(&self, stage: u32) {
        *self.0.lock().expect("not poisoned") = stage;
        self.1.notify_all();
    }

    /// → whether it was reached in time.
    fn wait(&self, stage: u32) -> bool {
        let now = self.0.lock().expect("not poisoned");
        !self.1.wait_timeout_while(now, SECONDS, |now| *now < stage).expect("alive").1.timed_out()
    }
}

/// Another host, which gives the page that is waited for at stage 3, and the others at stage 4.
#[derive(Debug)]
struct First(Arc<Stage>);

impl PageSource for First {
    fn origin(&self) -> Origin {
        Origin::Peer
    }

    fn unit_pages(&self) -> u64 {
        16
    }

    fn read(&self, range: PageRange, bytes: &mut [u8]) -> io::Result<()> {
        bytes.fill(7);
        match range.contains(LOST) {
            true => Err(io::Error::other("it went with its VM")),
            false => Ok(()),
        }
    }

    fn read_first(
        &self,
        range: PageRange,
        _: PageIdx,
        bytes: &mut [u8],
        came: &mut dyn FnMut(&[u8]),
    ) -> io::Result<()> {
        if !range.contains(LOST) {
            self.0.reached(1);
            assert!(self.0.wait(3), "it is not released in time");
            bytes.fill(7);
            came(&bytes[..4096]);
            assert!(self.0.wait(4), "the others are not released in time");
        }
        self.read(range, bytes)
    }
}

/// The engine may have other work: here it reports another lost VM to a slow listener.
#[test]
fn who_waits_for_it_does_not_wait_for_the_engine() {
    needs_userfaultfd!();
    let stage = Arc::new(Stage::default());
    let own = [StoredRun::Own(PageRange::first(PAGES))];
    let id = ImageId::new(1 << 40).expect("not 0");
    let image = HostImage::stored(id, PAGES, own, None, Arc::new(First(Arc::clone(&stage))));
    let for_sink = Arc::clone(&stage);
    let sink = move |event| {
        if let EngineEvent::ViewLost { .. } = event {
            for_sink.reached(2);
            assert!(for_sink.wait(4), "the other VM does not go on");
        }
    };
    let image = image.expect("opened");
    let engine = Engine::serve(image, &EngineOptions::default(), Arc::new(sink)).expect("engine");
    let engine = Arc::new(engine);
    let (mut waits, mut lost) = (clone_of(&engine), clone_of(&engine));
    waits.send("sum 40 1");
    assert!(stage.wait(1), "the page is not asked for");
    lost.send(&format!("sum {} 1", LOST.0));
    assert!(stage.wait(2), "the engine is not held up");
    stage.reached(3);
    let sum = waits.receive();
    stage.reached(4);
    assert_eq!(waits.ask("sum 41 1"), sum, "its neighbours are there, too");
}
