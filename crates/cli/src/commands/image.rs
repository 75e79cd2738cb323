//! `vmfork image`: building and importing happen here, in the state folder; listing and removing
//! through the daemon where one runs, which knows what is in use.

use anyhow::Context as _;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use vmfork_api::{Image, ImageProfile, TransferRequest};
use vmfork_guest_image::{
    Artifacts, BuildOptions, Cancel, Metadata, Progress, Stage, Store, build, import,
};

use super::serve;
use super::stores::{placed, push};
use super::{for_each, kill};
use crate::client::{Client, ConnectError, Query, WHOLE, find, unreachable};
use crate::config::{BuildConfig, Global, ImageAction, ImportConfig};
use crate::failure::{Exit, with_remedy};
use crate::format;
use crate::printer::Field;
use crate::start::reach;

/// Progress messages of a build that wait to be printed.
const NEWS_QUEUE_LEN: usize = 64;

#[derive(Serialize)]
struct Images {
    images: Vec<Image>,
}

#[derive(Serialize)]
struct Made {
    #[serde(flatten)]
    image: Image,
    /// False if it was there already, built from the same.
    fresh: bool,
}

/// Ends a build when the command is given up.
struct CancelOnDrop(Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

pub(super) async fn run(global: &Global, action: ImageAction) -> anyhow::Result<Exit> {
    match action {
        ImageAction::Build(config) => make(global, config).await,
        ImageAction::Ls => list(global).await,
        ImageAction::Rm { images } => remove(global, images).await,
        ImageAction::Import(config) => take_over(global, config).await,
        ImageAction::Push { name, location } => {
            let query = Query::new(format!("/v1/images/{name}/push"));
            push(global, query, &name, &location).await
        }
        ImageAction::Serve(config) => serve::run(global, config).await,
        ImageAction::Seed { name, stop: false } => seed(global, &name).await,
        ImageAction::Seed { name, stop: true } => unseed(global, &name).await,
        ImageAction::ShowProfile { name } => show_profile(global, &name).await,
        ImageAction::ResetProfile { name } => reset_profile(global, &name).await,
        ImageAction::Pull { name, location, wait } => pull(global, &name, &location, wait).await,
    }
}

fn store(global: &Global) -> Store {
    Store::new(global.state_dir.join("images"))
}

async fn make(global: &Global, config: BuildConfig) -> anyhow::Result<Exit> {
    let spec = config.spec()?;
    let artifacts = Artifacts::in_libdir(&Artifacts::libdir()).map_err(with_remedy)?;
    let cancel = Cancel::default();
    let _guard = CancelOnDrop(cancel.clone());
    let options = BuildOptions {
        name: config.name.clone(),
        cache_dir: global.cache_dir.clone(),
        artifacts,
        refresh: config.refresh,
        cancel,
    };
    let (tx, mut rx) = mpsc::channel(NEWS_QUEUE_LEN);
    let store = store(global);
    let building = spawn_blocking(move || {
        build(&spec, &store, &options, &mut |news| {
            // A step that finds the queue full is followed by another; a stage is waited for.
            if matches!(news, Progress::Step { .. }) {
                let _ = tx.try_send(news);
            } else {
                let _ = tx.blocking_send(news);
            }
        })
    });
    let bar = global.printer.steps(100, format!("Building `{}`", config.name));
    let mut stage = Stage::Index;
    while let Some(news) = rx.recv().await {
        match news {
            Progress::Stage(now) => {
                stage = now;
                bar.set_position(u64::from(stage.percent_before()));
                bar.set_message(format!("Building `{}`: {}", config.name, stage.label()));
                if !global.printer.shows_progress() {
                    global.printer.note(&format!("Building `{}`: {}", config.name, stage.label()));
                }
            }
            Progress::Step { done, total, what } => {
                bar.set_position(percent(stage, done, total));
                bar.set_message(format!("Building `{}`: {} {what}", config.name, stage.label()));
            }
            Progress::Note(text) => bar.suspend(|| global.printer.note(&text)),
            _ => {}
        }
    }
    let built = building.await.context("build the image")?.map_err(with_remedy)?;
    bar.finish_and_clear();
    report(global, &built.metadata, built.fresh)
}

/// How far a build is, in percent.
fn percent(stage: Stage, done: u32, total: Option<u32>) -> u64 {
    let from = u64::from(stage.percent_before());
    let next = Stage::ALL.into_iter().find(|other| *other > stage);
    let to = next.map_or(100, |next| u64::from(next.percent_before()));
    let total = u64::from(total.unwrap_or_default()).max(1);
    from + to.saturating_sub(from) * u64::from(done).min(total) / total
}

fn report(global: &Global, metadata: &Metadata, fresh: bool) -> anyhow::Result<Exit> {
    let image = metadata.to_api();
    if global.printer.json {
        global.printer.with_schema(&Made { image, fresh })?;
        return Ok(Exit::Done);
    }
    global.printer.line(&image.name)?;
    let size = format::size(image.size_bytes);
    global.printer.note(&if fresh {
        format!("`{}` is ready ({size})", image.name)
    } else {
        format!("`{}` is unchanged: its inputs are the same ({size})", image.name)
    });
    Ok(Exit::Done)
}

async fn take_over(global: &Global, config: ImportConfig) -> anyhow::Result<Exit> {
    let _guard = CancelOnDrop(config.options.cancel.clone());
    let store = store(global);
    let spinner = global.printer.spinner(format!("Importing `{}`", config.name));
    let importing = spawn_blocking(move || {
        import(&store, &config.name, config.from.brought(), &config.options)
    });
    let metadata = importing.await.context("import the image")?.map_err(with_remedy)?;
    spinner.finish_and_clear();
    report(global, &metadata, true)
}

/// The daemon, if one runs.
async fn daemon(global: &Global) -> anyhow::Result<Option<Client<'_>>> {
    match find(&global.endpoint).await {
        Ok(_) => Ok(Some(Client::unchecked(global))),
        Err(ConnectError::Absent(error)) => match &global.endpoint {
            crate::config::Endpoint::Unix(_) => Ok(None),
            // The store of another host can't be looked at from here.
            crate::config::Endpoint::Tcp(_) => Err(unreachable(global, error)),
        },
        Err(ConnectError::Other(error)) => Err(unreachable(global, error)),
    }
}

async fn list(global: &Global) -> anyhow::Result<Exit> {
    let images: Vec<Image> = match daemon(global).await? {
        Some(client) => client.get(Query::new("/v1/images")).await?,
        None => {
            let listed = store(global).list().map_err(with_remedy)?;
            listed.iter().map(Metadata::to_api).collect()
        }
    };
    if global.printer.json {
        global.printer.with_schema(&Images { images })?;
        return Ok(Exit::Done);
    }
    let rows = images.into_iter().map(|image| {
        vec![
            Field::Text(image.name),
            Field::Text(format::printable(&image.origin)),
            Field::Text(format::printable(&image.kernel)),
            Field::Text(if image.agent { "yes" } else { "no" }.to_owned()),
            Field::Figure(format::size(image.size_bytes)),
            Field::Figure(format::age_since(image.created_unix_ms)),
            Field::Figure(image.vms.to_string()),
        ]
    });
    global
        .printer
        .table(&["IMAGE", "ORIGIN", "KERNEL", "AGENT", "SIZE", "AGE", "VMS"], rows.collect())?;
    Ok(Exit::Done)
}

async fn pull(global: &Global, name: &str, location: &str, wait: bool) -> anyhow::Result<Exit> {
    let location = placed(global, location)?;
    let client = reach(global).await?;
    let spinner = global.printer.spinner(format!("Pulling `{name}` from {location}"));
    let request = TransferRequest { location: location.clone(), wait };
    let query = Query::new(format!("/v1/images/{name}/pull"));
    let image: Image = client.post(query, &request, WHOLE).await?;
    spinner.finish_and_clear();
    if global.printer.json {
        global.printer.with_schema(&image)?;
        return Ok(Exit::Done);
    }
    global.printer.line(&image.name)?;
    global.printer.note(&pulled(&image, &location));
    Ok(Exit::Done)
}

async fn seed(global: &Global, name: &str) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let spinner = global.printer.spinner(format!("Copying `{name}` to the host's store"));
    let query = Query::new(format!("/v1/images/{name}/seed"));
    let image: Image = client.act(query, WHOLE).await?;
    spinner.finish_and_clear();
    if global.printer.json {
        global.printer.with_schema(&image)?;
        return Ok(Exit::Done);
    }
    global.printer.note(&format!("Hosts of the cluster can pull it: `vmfork image pull {name}`"));
    Ok(Exit::Done)
}

async fn unseed(global: &Global, name: &str) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    client.delete(Query::new(format!("/v1/images/{name}/seed"))).await?;
    global.printer.note(&format!("No host pulls `{name}` from this one any more"));
    Ok(Exit::Done)
}

async fn show_profile(global: &Global, name: &str) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    let profile: ImageProfile = client.get(profile_of(name)).await?;
    if global.printer.json {
        global.printer.with_schema(&profile)?;
        return Ok(Exit::Done);
    }
    let rows = profile.workloads.iter().map(|workload| {
        vec![
            Field::Text(format::printable(&workload.workload)),
            Field::Figure(format::count(workload.runs.into())),
            Field::Figure(format::size(workload.read_bytes)),
            Field::Figure(format::millis(workload.half_ms)),
            Field::Figure(format::size(workload.read_bytes_any)),
        ]
    });
    let heads = ["WORKLOAD", "RUNS", "MOST READ", "HALF AFTER", "ANY READ"];
    global.printer.table(&heads, rows.collect())?;
    Ok(Exit::Done)
}

async fn reset_profile(global: &Global, name: &str) -> anyhow::Result<Exit> {
    let client = reach(global).await?;
    client.delete(profile_of(name)).await?;
    global.printer.note(&format!("Deleted the record of what VMs read of `{name}`"));
    Ok(Exit::Done)
}

fn profile_of(image: &str) -> Query {
    Query::new(format!("/v1/images/{image}/profile"))
}

fn pulled(image: &Image, location: &str) -> String {
    let name = format::printable(&image.name);
    match &image.remote {
        Some(_) => {
            format!(
                "VMs can boot from `{name}`; its root file system still arrives from {location}"
            )
        }
        None => format!("`{name}` is ready ({})", format::size(image.size_bytes)),
    }
}

async fn remove(global: &Global, images: Vec<String>) -> anyhow::Result<Exit> {
    let daemon = daemon(global).await?;
    let answers = match &daemon {
        Some(client) => {
            for_each(images, |name| async move {
                client.delete(Query::new(format!("/v1/images/{name}"))).await
            })
            .await
        }
        None => {
            let store = &store(global);
            for_each(images, |name| async move {
                let (store, name) = (store.clone(), name);
                let removing = spawn_blocking(move || store.remove(&name));
                removing.await.context("remove the image")?.map_err(with_remedy)
            })
            .await
        }
    };
    kill::report(
        global,
        "Removed",
        answers.into_iter().map(|(name, answer)| (name, answer.map(|()| None))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pull_says_what_is_still_to_come() {
        let mut image = Image {
            name: "web".to_owned(),
            size_bytes: 300 << 20,
            created_unix_ms: 0,
            origin: String::new(),
            kernel: String::new(),
            agent: true,
            vms: 0,
            remote: Some("s3://a/b".to_owned()),
            seeded: true,
        };
        assert!(pulled(&image, "s3://a/b").contains("still arrives from s3://a/b"));
        image.remote = None;
        assert_eq!(pulled(&image, "s3://a/b"), "`web` is ready (300 MiB)");
    }

    #[test]
    fn a_build_only_goes_forward() {
        let mut last = 0;
        for stage in Stage::ALL {
            for done in [0, 5, 10, 20] {
                let now = percent(stage, done, Some(10));
                assert!(now >= last && now <= 100, "{stage:?} {done}: {now} after {last}");
                last = now;
            }
        }
        assert_eq!(percent(Stage::Index, 3, None), u64::from(Stage::Download.percent_before()));
    }
}
