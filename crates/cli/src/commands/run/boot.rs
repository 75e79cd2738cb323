//! A VM from an image: prints its name, for `vm=$(vmfork run IMAGE)`.

use vmfork_api::{Vm, VmState};

use super::accel_word;
use crate::client::{Client, Query};
use crate::config::BootConfig;
use crate::failure::Exit;
use crate::format;

pub(super) async fn run(client: &Client<'_>, config: BootConfig) -> anyhow::Result<Exit> {
    let printer = &client.global.printer;
    let image = &config.request.image;
    let spinner = printer.spinner(match &config.request.name {
        Some(name) => format!("Booting `{name}` from `{image}`"),
        None => format!("Booting `{image}`"),
    });
    let vm: Vm = client.post(Query::new("/v1/vms"), &config.request, config.bound).await?;
    spinner.finish_and_clear();
    if printer.json {
        printer.with_schema(&vm)?;
    } else {
        printer.line(&vm.name)?;
        printer.note(&summary(&vm));
    }
    Ok(Exit::Done)
}

fn summary(vm: &Vm) -> String {
    let machine = format!(
        "{}, {}, {}",
        format::plural(u64::from(vm.cpus), "vCPU"),
        format::size(vm.memory_mib.saturating_mul(1 << 20)),
        accel_word(vm.accel)
    );
    match (vm.state, vm.ready_ms) {
        (VmState::Running, Some(ready_ms)) => {
            format!("`{}` is ready after {} ({machine})", vm.name, format::millis(ready_ms))
        }
        _ => format!("`{}` is {} ({machine})", vm.name, crate::printer::state_word(vm.state)),
    }
}
