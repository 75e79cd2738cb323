//! `vmfork run`: prints the new VM's name, for `vm=$(vmfork run IMAGE)`.

use vmfork_api::{Accel, Vm, VmState};

use crate::client::{Client, Query};
use crate::config::{Global, RunConfig};
use crate::failure::Exit;
use crate::format;

pub(super) async fn run(global: &Global, config: RunConfig) -> anyhow::Result<Exit> {
    let client = Client::new(global).await?;
    let image = &config.request.image;
    let spinner = global.printer.spinner(match &config.request.name {
        Some(name) => format!("Booting `{name}` from `{image}`"),
        None => format!("Booting `{image}`"),
    });
    let vm: Vm = client.post(Query::new("/v1/vms"), &config.request, config.bound).await?;
    spinner.finish_and_clear();
    if global.printer.json {
        global.printer.with_schema(&vm)?;
    } else {
        global.printer.line(&vm.name)?;
        global.printer.note(&summary(&vm));
    }
    Ok(Exit::Done)
}

pub(super) fn accel_word(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "kvm",
        Accel::Tcg => "tcg",
    }
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
