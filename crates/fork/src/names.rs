//! Which names the VMs of one start get.

use std::collections::HashSet;

use vmfork_agent_proto::TicketClone;
use vmfork_host::core::{Core, Reservation};

use crate::error::Error;

/// One that is wanted.
#[derive(Debug)]
pub struct Wanted {
    pub name: String,
    /// Whether the name is kept for it: if not, another VM has it.
    pub is_kept: bool,
    /// The number of its first worker.
    pub vmid: u32,
    pub ticket: Option<TicketClone>,
}

/// What VMs that are started together are to be called.
#[derive(Debug, Clone, Copy)]
pub struct Names<'a> {
    /// As many as VMs; without, they get `stem` with the next free numbers.
    pub wanted: Option<&'a [String]>,
    pub stem: &'a str,
    pub count: u32,
    /// Names that VMs of other hosts have.
    pub taken: Option<&'a HashSet<String>>,
}

/// Names for all VMs in their order, each with whether it is kept for it: if not, another VM has
/// it.
///
/// # Errors
/// None can be kept; or not all, if that is as bad.
pub fn reserve(
    core: &Core,
    names: Names<'_>,
    all_or_nothing: bool,
) -> Result<(Reservation, Vec<(String, bool)>), Error> {
    let is_taken = |name: &str| names.taken.is_some_and(|taken| taken.contains(name));
    let Some(wanted) = names.wanted else {
        let reservation = core.registry.reserve_for_clones(names.stem, names.count, is_taken);
        let names = reservation.names().iter().map(|name| (name.clone(), true)).collect();
        return Ok((reservation, names));
    };
    let free = wanted.iter().map(String::as_str).filter(|name| !is_taken(name));
    let reservation = core.registry.reserve(&free.collect::<Vec<_>>());
    let names = which_are_kept(wanted, reservation.names());
    let taken = names.iter().find(|(_, is_kept)| !is_kept);
    match taken {
        Some((name, _)) if all_or_nothing || reservation.names().is_empty() => {
            Err(Error::NameTaken { name: name.clone() })
        }
        _ => Ok((reservation, names)),
    }
}

/// `kept` are some of `wanted`, in the same order.
fn which_are_kept(wanted: &[String], kept: &[String]) -> Vec<(String, bool)> {
    let mut kept = kept.iter().peekable();
    wanted.iter().map(|name| (name.clone(), kept.next_if_eq(&name).is_some())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_name_is_the_affair_of_its_clone() {
        let [a, b, c] = ["a", "b", "c"].map(ToOwned::to_owned);
        let wanted = [a.clone(), b.clone(), c.clone()];
        let kept =
            |kept: &[String]| which_are_kept(&wanted, kept).into_iter().map(|(_, kept)| kept);
        assert!(kept(&[a.clone(), c]).eq([true, false, true]));
        assert!(kept(&[b]).eq([false, true, false]));
        let twice = which_are_kept(&[a.clone(), a.clone()], std::slice::from_ref(&a));
        assert_eq!(twice, [(a.clone(), true), (a, false)]);
    }
}
