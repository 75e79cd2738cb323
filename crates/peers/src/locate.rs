//! Where a VM is, and who else has its name. All hosts are asked at once, and those that are silent
//! only if it matters.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::future::join_all;
use vmfork_api::{ErrorCode, VmDetail};
use vmfork_cluster::{Entry, HostId};

use super::client::WORD_WAIT;
use super::error::{CallError, ClusterError};
use super::hosts::{Hosts, There};

/// Where a host is asked for the names of its VMs.
pub(super) const NAMES: &str = "/cluster/v1/names";

/// What hosts that were asked for a VM say together.
#[derive(Debug, Default)]
struct Search {
    /// Who has it, and what id it has there.
    found: Vec<(Entry, Option<String>)>,
    /// Who did not say whether it has.
    silent: Vec<String>,
}

impl Search {
    fn heard(&mut self, host: Entry, said: Result<Bytes, CallError>) {
        match said {
            Ok(body) => {
                let detail = serde_json::from_slice::<VmDetail>(&body).ok();
                self.found.push((host, detail.map(|detail| detail.vm.id)));
            }
            Err(CallError::Refused { source, .. }) if source.code == ErrorCode::NotFound => {}
            Err(_) => self.silent.push(host.name),
        }
    }

    /// The host that has it, with the id; `None`: no host has it.
    ///
    /// # Errors
    /// Several have, or one may have it that is silent.
    fn outcome(mut self) -> Result<Option<(Entry, Option<String>)>, ClusterError> {
        if self.found.len() > 1 {
            let hosts = self.found.into_iter().map(|(host, _)| host.name).collect();
            return Err(ClusterError::SeveralHave { hosts });
        }
        match self.found.pop() {
            None if !self.silent.is_empty() => {
                self.silent.sort();
                Err(ClusterError::Silent { hosts: self.silent })
            }
            found => Ok(found),
        }
    }
}

/// VMs that are remembered to be elsewhere.
const SEEN_MAX: usize = 65_536;

/// Finds VMs on other hosts.
#[derive(Debug)]
pub struct Locate {
    hosts: Arc<Hosts>,
    /// Where VMs of other hosts were seen last, by id: of a name another host may have one, too.
    seen: Mutex<HashMap<String, HostId>>,
}

impl Locate {
    pub(super) fn new(hosts: &Arc<Hosts>) -> Self {
        Self { hosts: Arc::clone(hosts), seen: Mutex::default() }
    }

    fn all_seen(&self) -> MutexGuard<'_, HashMap<String, HostId>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remember where a VM is.
    pub(super) fn saw(&self, id: &str, host: HostId) {
        let mut seen = self.all_seen();
        if seen.len() >= SEEN_MAX {
            seen.clear();
        }
        seen.insert(id.to_owned(), host);
    }

    /// Where a VM was seen last, by id.
    pub(super) fn seen(&self, id: &str) -> Option<Entry> {
        let host = self.all_seen().get(id).copied();
        host.and_then(|host| self.hosts.roster.read(|book| book.member(host).cloned()))
    }

    async fn ask_each(
        &self,
        hosts: Vec<Entry>,
        path: &str,
    ) -> Vec<(Entry, Result<Bytes, CallError>)> {
        let asked = hosts.into_iter().map(|entry| {
            let peer = self.hosts.peer(&entry);
            async move { (entry, peer.get(path, WORD_WAIT).await) }
        });
        join_all(asked).await
    }

    /// The host that has a VM, by name or id, if another one has. For an id: the one that had it
    /// last is asked first.
    ///
    /// # Errors
    /// Several have one of that name, or no host that answers has it.
    pub(super) async fn host_of(&self, vm: &str) -> Result<Option<Entry>, ClusterError> {
        let path = format!("/v1/vms/{vm}");
        if let Some(entry) = self.seen(vm)
            && self.hosts.peer(&entry).get(&path, WORD_WAIT).await.is_ok()
        {
            return Ok(Some(entry));
        }
        let There { alive, suspect, gone } = self.hosts.there();
        let mut search = Search::default();
        for hosts in [alive, suspect] {
            for (host, said) in self.ask_each(hosts, &path).await {
                search.heard(host, said);
            }
            if !search.found.is_empty() {
                break;
            }
        }
        search.silent.extend(gone.into_iter().map(|entry| entry.name));
        let Some((host, id)) = search.outcome()? else { return Ok(None) };
        if let Some(id) = id {
            self.saw(&id, host.id);
        }
        Ok(Some(host))
    }

    /// The names of the VMs of all other hosts that are alive, each with its host's.
    pub async fn hosts_of_names(&self) -> HashMap<String, String> {
        let mut hosts = HashMap::new();
        for (host, said) in self.ask_each(self.hosts.there().alive, NAMES).await {
            let names =
                said.ok().and_then(|body| serde_json::from_slice::<Vec<String>>(&body).ok());
            hosts.extend(names.into_iter().flatten().map(|name| (name, host.name.clone())));
        }
        hosts
    }

    /// The names of the VMs of all other hosts that are alive.
    pub async fn names_elsewhere(&self) -> HashSet<String> {
        self.hosts_of_names().await.into_keys().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use rustls::pki_types::CertificateDer;
    use vmfork_api::ErrorBody;
    use vmfork_cluster::{Fingerprint, HostState};

    use super::*;

    fn host(number: u64) -> Entry {
        Entry {
            id: HostId::new(number).expect("not 0"),
            name: format!("h{number}"),
            address: "10.0.0.1:7072".to_owned(),
            fingerprint: Fingerprint::of(&CertificateDer::from(vec![1])),
            state: HostState::Active,
            incarnation: 1,
        }
    }

    fn silence() -> CallError {
        let (host, address) = ("h".to_owned(), "a".to_owned());
        CallError::Connect { host, address, source: io::ErrorKind::TimedOut.into() }
    }

    fn none() -> CallError {
        let source = ErrorBody::new(ErrorCode::NotFound, "none");
        CallError::Refused { host: "h".to_owned(), source }
    }

    fn searched(said: Vec<Result<Bytes, CallError>>) -> Result<Option<String>, ClusterError> {
        let mut search = Search::default();
        for (number, said) in (1..).zip(said) {
            search.heard(host(number), said);
        }
        Ok(search.outcome()?.map(|(host, _)| host.name))
    }

    #[test]
    fn a_vm_that_a_silent_host_may_have_is_not_said_to_be_nowhere() {
        assert_eq!(searched(vec![Err(none()), Err(none())]).expect("all answer"), None);
        let error =
            searched(vec![Err(none()), Err(silence()), Err(silence())]).expect_err("who knows");
        assert!(matches!(error, ClusterError::Silent { .. }), "{error}");
        assert!(error.to_string().contains("do not answer: h2, h3"), "{error}");
        let there = || Ok(Bytes::from_static(b"{}"));
        assert_eq!(
            searched(vec![Err(silence()), there()]).expect("one has it").as_deref(),
            Some("h2")
        );
        let error = searched(vec![there(), Err(none()), there()]).expect_err("which one?");
        assert!(matches!(error, ClusterError::SeveralHave { .. }), "{error}");
        assert!(error.to_string().contains("h1, h3"), "{error}");
    }
}
