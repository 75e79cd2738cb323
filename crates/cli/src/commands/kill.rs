//! `vmfork kill`: every VM named is tried, whatever becomes of the others.

use std::time::Duration;

use serde::Serialize;
use vmfork_api::{ErrorBody, Vm};

use super::for_each;
use crate::client::{QUICK, Query};
use crate::config::{Global, KillConfig};
use crate::failure::{Exit, Report};
use crate::start::reach;

/// What was done to each of several VMs.
#[derive(Serialize)]
struct Results {
    results: Vec<Outcome>,
}

#[derive(Serialize)]
struct Outcome {
    name: String,
    done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    vm: Option<Vm>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorBody>,
}

pub(super) async fn run(global: &Global, config: KillConfig) -> anyhow::Result<Exit> {
    let client = &reach(global).await?;
    let request = &config.request;
    let bound = QUICK.saturating_add(Duration::from_millis(request.grace_ms));
    let spinner = global.printer.spinner(format!("Stopping {}", config.vms.join(" ")));
    let answers = for_each(config.vms, |vm| async move {
        let path = Query::new(format!("/v1/vms/{vm}/kill"));
        client.post_to_all::<Vm>(path, request, bound, "VMs of the family there keep running").await
    })
    .await;
    spinner.finish_and_clear();
    report(global, "Killed", answers.into_iter().map(|(name, answer)| (name, answer.map(Some))))
}

/// Prints the result for each name; fails if one failed.
pub(super) fn report(
    global: &Global,
    verb: &str,
    answers: impl Iterator<Item = (String, anyhow::Result<Option<Vm>>)>,
) -> anyhow::Result<Exit> {
    let mut results = Vec::new();
    for (name, answer) in answers {
        let (vm, error) = match answer {
            Ok(vm) => (vm, None),
            Err(error) => (None, Some(error)),
        };
        match &error {
            Some(error) if !global.printer.json => global.printer.error(error),
            Some(_) => {}
            None => global.printer.note(&format!("{verb} `{name}`")),
        }
        let error = error.map(|error| Report::of(&error).body());
        results.push(Outcome { name, done: error.is_none(), vm, error });
    }
    let failed = results.iter().any(|result| !result.done);
    if global.printer.json {
        global.printer.with_schema(&Results { results })?;
    }
    Ok(if failed { Exit::Failed } else { Exit::Done })
}
