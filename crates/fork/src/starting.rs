//! The clones of one fork while they are being started, a task each.
//!
//! Promises: each is reported once, also one whose task panics; unless they were given up.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::task::{Id, JoinSet};
use vmfork_api::CloneResult;

use crate::error::Error;
use vmfork_host::vm::Vm;

/// A clone's line in the reply, and the VM if it is ready.
pub(super) type Started = (CloneResult, Option<Arc<Vm>>);

/// A clone whose start came to no end of its own.
#[derive(Debug)]
pub(super) struct Broken {
    pub(super) vmid: u32,
    pub(super) name: String,
    pub(super) error: Error,
}

#[derive(Debug, Default)]
pub(super) struct Starting {
    tasks: JoinSet<Started>,
    /// Number and name, for those whose task can't say them any more.
    who: HashMap<Id, (u32, String)>,
}

impl Starting {
    pub(super) fn add(
        &mut self,
        vmid: u32,
        name: String,
        start: impl Future<Output = Started> + Send + 'static,
    ) {
        let task = self.tasks.spawn(start).id();
        self.who.insert(task, (vmid, name));
    }

    /// The next that is through; `None` when all are. Dropping the future loses nothing.
    pub(super) async fn next(&mut self) -> Option<Result<Started, Broken>> {
        loop {
            match self.tasks.join_next_with_id().await? {
                Ok((task, started)) => {
                    self.who.remove(&task);
                    return Some(Ok(started));
                }
                Err(error) => {
                    let who = self.who.remove(&error.id());
                    if let Some((vmid, name)) = who.filter(|_| error.is_panic()) {
                        tracing::error!(clone = name, %error, "a clone's start panicked");
                        let error = vmfork_host::error::Error::Panicked(error).into();
                        return Some(Err(Broken { vmid, name, error }));
                    }
                }
            }
        }
    }

    /// Those that are not through end where they are.
    pub(super) fn give_up(&mut self) {
        self.tasks.abort_all();
    }
}

#[cfg(test)]
mod tests {
    use vmfork_api::{ErrorBody, ErrorCode};

    use super::*;

    fn started(vmid: u32) -> Started {
        let error = ErrorBody::new(ErrorCode::Qemu, "in this test");
        (crate::clone::failed(vmid, format!("web.{vmid}"), error), None)
    }

    #[tokio::test]
    async fn a_start_that_panics_is_a_failure_of_that_clone() {
        let mut starting = Starting::default();
        starting.add(1, "web.1".to_owned(), async { started(1) });
        starting.add(2, "web.2".to_owned(), async { panic!("in this test") });
        starting.add(3, "web.3".to_owned(), async { started(3) });
        let (mut through, mut broken) = (Vec::new(), Vec::new());
        while let Some(next) = starting.next().await {
            match next {
                Ok((result, _)) => through.push(result.vmid),
                Err(Broken { vmid, name, error }) => {
                    broken.push((vmid, name, error.to_body("start it").code));
                }
            }
        }
        through.sort_unstable();
        assert_eq!(through, [1, 3]);
        assert_eq!(broken, [(2, "web.2".to_owned(), ErrorCode::Internal)]);
    }

    #[tokio::test]
    async fn what_is_given_up_is_told_no_more() {
        let mut starting = Starting::default();
        starting.add(1, "web.1".to_owned(), std::future::pending());
        starting.give_up();
        assert!(starting.next().await.is_none());
    }
}
