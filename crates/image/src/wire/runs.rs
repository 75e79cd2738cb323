//! Runs of something that each belong to a named image or to none: what page tables and homes have
//! in common.

use std::collections::HashMap;

use super::{ImageName, Limits};
use crate::bytes::{Cursor, Flaw, put_varint};

const VERSION: u8 = 1;
const NAME_BYTES: usize = 16;
/// A run is two numbers of at least a byte.
const RUN_BYTES_MIN: usize = 2;

/// What bytes said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Coded {
    /// Pages or blocks: the sum of all runs.
    pub(super) units: u64,
    pub(super) names: Vec<ImageName>,
    runs: Vec<Run>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    units: u64,
    /// 0 for none, else a place in the names, from 1.
    name: usize,
}

impl Coded {
    /// Start, length and name of each run.
    pub(super) fn runs(&self) -> impl Iterator<Item = (u64, u64, Option<ImageName>)> + '_ {
        let mut start = 0;
        self.runs.iter().map(move |run| {
            let name = run.name.checked_sub(1).and_then(|at| self.names.get(at)).copied();
            let this = (start, run.units, name);
            start += run.units;
            this
        })
    }
}

pub(super) fn encode(
    magic: [u8; 4],
    runs: impl Iterator<Item = (u64, Option<ImageName>)>,
) -> Vec<u8> {
    let mut names = Vec::new();
    let mut places = HashMap::new();
    let mut merged: Vec<Run> = Vec::new();
    let mut units = 0u64;
    for (len, name) in runs.filter(|(len, _)| *len > 0) {
        units += len;
        let place = name.map_or(0, |name| {
            *places.entry(name).or_insert_with(|| {
                names.push(name);
                names.len()
            })
        });
        match merged.last_mut() {
            Some(last) if last.name == place => last.units += len,
            _ => merged.push(Run { units: len, name: place }),
        }
    }
    let mut bytes = Vec::with_capacity(32 + names.len() * NAME_BYTES + merged.len() * 3);
    bytes.extend(magic);
    bytes.push(VERSION);
    put_varint(&mut bytes, units);
    put_varint(&mut bytes, names.len() as u64);
    for name in names {
        bytes.extend(name.host.to_le_bytes());
        bytes.extend(name.image.to_le_bytes());
    }
    put_varint(&mut bytes, merged.len() as u64);
    for run in merged {
        put_varint(&mut bytes, run.units);
        put_varint(&mut bytes, run.name as u64);
    }
    bytes
}

/// `what` the bytes should be, and of which `unit`, for errors.
pub(super) fn decode(
    bytes: &[u8],
    magic: [u8; 4],
    what: &str,
    unit: &str,
    limits: Limits,
) -> Result<Coded, Flaw> {
    let mut cursor = Cursor::new(bytes);
    cursor.magic(magic, VERSION, what)?;
    let at = cursor.offset();
    let units = cursor.varint("the size")?;
    if units > limits.pages_max {
        return Err(Flaw::at(at, format!("{units} {unit}, at most {} may be", limits.pages_max)));
    }
    let names = decode_names(&mut cursor, limits.names_max)?;
    let runs = decode_runs(&mut cursor, units, unit, names.len(), limits.runs_max)?;
    cursor.end(what)?;
    Ok(Coded { units, names, runs })
}

/// How many of something follow, if that is at most `most` and there is room for them in what is
/// left.
fn count(
    cursor: &mut Cursor<'_>,
    things: &str,
    most: u64,
    bytes_each: usize,
) -> Result<usize, Flaw> {
    let at = cursor.offset();
    let count = cursor.varint(&format!("the number of {things}"))?;
    if count > most {
        return Err(Flaw::at(at, format!("{count} {things}, at most {most} may be")));
    }
    let room = cursor.rest_bytes() / bytes_each;
    match usize::try_from(count) {
        Ok(count) if count <= room => Ok(count),
        _ => Err(Flaw::at(at, format!("{count} {things}, and room for {room} at most follows"))),
    }
}

fn decode_names(cursor: &mut Cursor<'_>, most: u64) -> Result<Vec<ImageName>, Flaw> {
    let count = count(cursor, "names", most, NAME_BYTES)?;
    let mut places = HashMap::with_capacity(count);
    let mut names = Vec::with_capacity(count);
    for place in 0..count {
        let at = cursor.offset();
        let name = ImageName { host: cursor.u64("a host")?, image: cursor.u64("an image")? };
        if let Some(first) = places.insert(name, place) {
            return Err(Flaw::at(
                at,
                format!("names {} and {} are both {name}", first + 1, place + 1),
            ));
        }
        names.push(name);
    }
    Ok(names)
}

fn decode_runs(
    cursor: &mut Cursor<'_>,
    units: u64,
    unit: &str,
    names: usize,
    most: u64,
) -> Result<Vec<Run>, Flaw> {
    let count = count(cursor, "runs", most, RUN_BYTES_MIN)?;
    let mut runs: Vec<Run> = Vec::with_capacity(count);
    // Names that have been said, units that have been.
    let (mut said, mut end) = (0, 0u64);
    for _ in 0..count {
        let at = cursor.offset();
        let len = cursor.varint("a run's length")?;
        if len == 0 || len > units - end {
            let what = format!("a run of {len} {unit} after {end}, of {units} in all");
            return Err(Flaw::at(at, what));
        }
        end += len;
        let at = cursor.offset();
        let name = cursor.varint("a run's name")?;
        // The next that was not said yet, at most: names come in the order in which they are said.
        let name = match usize::try_from(name) {
            Ok(name) if name <= names.min(said + 1) => name,
            _ => {
                let what = format!("a run has name {name}, where {said} of {names} were said");
                return Err(Flaw::at(at, what));
            }
        };
        said = said.max(name);
        if runs.last().is_some_and(|last| last.name == name) {
            return Err(Flaw::at(at, format!("two runs that touch have name {name}")));
        }
        runs.push(Run { units: len, name });
    }
    if end < units {
        return Err(Flaw::at(cursor.offset(), format!("the runs are {end} {unit} of {units}")));
    }
    if said < names {
        return Err(Flaw::at(cursor.offset(), format!("no run has name {}", said + 1)));
    }
    Ok(runs)
}
