//! `vmfork image serve`: an image's root as a file, and on an NBD socket, for other programs.
//!
//! ```text
//!   DIR/IMAGE.img ──FUSE──┐
//!                         ├──► Client ──NBD, over the API's connection──► vmforkd
//!   SOCKET ──NBD, Relay───┘
//! ```
//!
//! Mount, socket and what was written end with this command. A daemon that is started again
//! is waited for, unless programs may have written.

mod relay;

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use serde::Serialize;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval};
use vmfork_fuse::{MountError, MountOptions, Mounted};
use vmfork_nbd::{Client as NbdClient, Connect};

use self::relay::Socket;
use crate::client::{Client, Query};
use crate::config::{Global, ServeConfig};
use crate::failure::{Exit, HintExt as _};
use crate::start::reach;

/// How often the mount is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

#[derive(Serialize)]
struct Shown {
    image: String,
    size_bytes: u64,
    writable: bool,
    file: Option<PathBuf>,
    nbd: Option<PathBuf>,
}

pub(super) async fn run(global: &Global, config: ServeConfig) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let query = Query::new(format!("/v1/images/{}/nbd", config.image));
    let query = if config.writable { query.with("writable", "true") } else { query };
    // The first connection is made here, so that its error is told whole.
    let first = client.open_nbd(&query).await?;
    let (connect, asked) = connector(first, config.writable);
    let image = config.image.clone();
    let (to, started) = oneshot::channel();
    std::thread::Builder::new()
        .name("nbd-start".to_owned())
        .spawn(move || drop(to.send(NbdClient::start(connect, &image))))
        .context("start a thread")?;
    let nbd = started.await.context("start a client")?;
    let nbd =
        Arc::new(nbd.with_context(|| format!("speak NBD with the daemon at {}", global.endpoint))?);
    let socket = match &config.socket {
        Some(path) => Some(Socket::listen(path, &config.image, Arc::clone(&nbd))?),
        None => None,
    };
    let mounted = mount(&config, &nbd)?;
    show(global, &config, nbd.export().size_bytes)?;
    // Dropped before the client, whose thread may wait for it.
    let mut asked = asked;
    let mut look = interval(LOOK_EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            reply = asked.recv() => match reply {
                Some(reply) => again(global, &client, &query, reply).await,
                None => return lost(&config, nbd.is_replaced()),
            },
            _ = look.tick() => {
                if mounted.as_ref().is_some_and(|mounted| !mounted.is_there()) {
                    global.printer.note("The folder was unmounted");
                    break;
                }
            }
        }
    }
    drop((socket, mounted));
    Ok(Exit::Done)
}

/// The client has given up.
fn lost(config: &ServeConfig, is_replaced: bool) -> anyhow::Result<Exit> {
    if is_replaced {
        return Err(anyhow!("the daemon has another image by the name `{}` now", config.image))
            .hint("serve it again, and open its file again");
    }
    let error = anyhow!("the daemon went away, and `{}` is not served any more", config.image);
    Err(match config.writable {
        true => error.context("what was written is lost"),
        false => error,
    })
}

/// Where a new connection to the daemon goes.
type Reply = mpsc::SyncSender<io::Result<UnixStream>>;

/// Connects for a client: first what is there, then what is sent to those who are asked.
fn connector(first: UnixStream, writable: bool) -> (Connect, UnboundedReceiver<Reply>) {
    let (ask, asked): (UnboundedSender<Reply>, _) = unbounded_channel();
    let mut first = Some(first);
    let connect = move || {
        if let Some(first) = first.take() {
            return Ok(first);
        }
        let ended = || io::Error::from(io::ErrorKind::PermissionDenied);
        if writable {
            // What was written has gone with the connection.
            return Err(ended());
        }
        let (reply, replied) = mpsc::sync_channel(1);
        ask.send(reply).map_err(|_gone| ended())?;
        replied.recv().map_err(|_gone| ended())?
    };
    (Box::new(connect), asked)
}

async fn again(global: &Global, client: &Client<'_>, query: &Query, reply: Reply) {
    let opened = client.open_nbd(query).await;
    if let Err(error) = &opened {
        global.printer.detail(&format!("connect again: {error:#}"));
    }
    // The client looks again until its time is over.
    let _gone = reply.send(opened.map_err(io::Error::other));
}

fn mount(config: &ServeConfig, nbd: &Arc<NbdClient>) -> anyhow::Result<Option<Mounted>> {
    let Some(folder) = &config.folder else { return Ok(None) };
    let options = MountOptions { name: file_name(&config.image), allow_other: config.allow_other };
    let mounted = Mounted::new(Arc::clone(nbd), folder, &options);
    let hint = match &mounted {
        Err(MountError::Folder { .. }) => "make it with `mkdir`",
        Err(MountError::NotEmpty { .. }) => "name a folder with nothing in it",
        Err(MountError::Device(_)) => "`--nbd SOCKET` needs no FUSE; else is /dev/fuse there?",
        Err(_) => "use sudo: it takes the right to mount; `--nbd SOCKET` needs no right",
        Ok(_) => return Ok(mounted.ok()),
    };
    let shown = || format!("show `{}` in {}", config.image, folder.display());
    mounted.map(Some).with_context(shown).hint(hint)
}

fn file_name(image: &str) -> String {
    format!("{image}.img")
}

fn show(global: &Global, config: &ServeConfig, size_bytes: u64) -> anyhow::Result<()> {
    let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
    let file =
        config.folder.as_ref().map(|folder| absolute(&folder.join(file_name(&config.image))));
    let nbd = config.socket.as_ref().map(absolute);
    if global.printer.json {
        let (image, writable) = (config.image.clone(), config.writable);
        return global.printer.with_schema(&Shown { image, size_bytes, writable, file, nbd });
    }
    if let Some(file) = file {
        global.printer.line(&printable(&file)?)?;
    }
    if let Some(socket) = nbd {
        global.printer.line(&format!("nbd+unix:///?socket={}", printable(&socket)?))?;
    }
    let written = if config.writable { "; what was written is lost then" } else { "" };
    global.printer.note(&format!("Serving `{}` until Ctrl-C{written}", config.image));
    Ok(())
}

fn printable(path: &std::path::Path) -> anyhow::Result<String> {
    let text = path.to_str().ok_or_else(|| anyhow!("the path {} is not UTF-8", path.display()))?;
    Ok(text.to_owned())
}
