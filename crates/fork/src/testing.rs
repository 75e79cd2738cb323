//! Forks of a host without others, for tests.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use vmfork_api::ErrorBody;
use vmfork_host::core::Core;
use vmfork_host::vm::Vm;

use crate::forker::Forker;
use crate::places::Allotted;
use crate::remote::{Away, PlanAsk, Remote};
use crate::tickets::Tickets;

/// There are no other hosts.
#[derive(Debug)]
struct Alone;

impl Remote for Alone {
    fn here(&self) -> Option<String> {
        None
    }

    fn names(&self) -> BoxFuture<'_, Option<HashSet<String>>> {
        async { None }.boxed()
    }

    fn plan<'a>(
        &'a self,
        _ask: PlanAsk<'a>,
    ) -> BoxFuture<'a, Result<Option<Box<dyn Away>>, ErrorBody>> {
        async { Ok(None) }.boxed()
    }

    fn reserve<'a>(
        &'a self,
        _core: &'a Core,
        _parent: &'a Vm,
        _vms: u32,
        _message: &'a str,
    ) -> BoxFuture<'a, Option<Allotted>> {
        async { None }.boxed()
    }
}

/// For a host that is in no cluster.
pub fn forker(core: &Arc<Core>) -> Arc<Forker> {
    Arc::new(Forker { core: Arc::clone(core), remote: Arc::new(Alone), tickets: Arc::new(Tickets) })
}
