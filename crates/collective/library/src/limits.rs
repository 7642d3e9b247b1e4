//! Descriptors of this process: whether there are enough of them, and what to say where there are
//! not.

use crate::error::{io, Result};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

/// What is left for others.
const SPARE: u64 = 64;

/// What an error says besides where it is that no descriptor is left.
pub(crate) fn descriptors(error: &std::io::Error) -> String {
    hint(error.raw_os_error())
}

pub(crate) fn hint(errno: Option<i32>) -> String {
    if errno != Some(rustix::io::Errno::MFILE.raw_os_error()) {
        return String::new();
    }
    let limit = getrlimit(Resource::Nofile);
    let shown = |limit: Option<u64>| limit.map_or("any number of".to_string(), |n| n.to_string());
    format!(
        "; this process may have {} descriptors: `ulimit -n` raises that, to {} at most",
        shown(limit.current),
        shown(limit.maximum)
    )
}

/// Raises the soft limit of descriptors of this process as far as the hard one lets it, so far only
/// as is useful: to `most`. For programs at their start; one that waits by `select` must not.
pub fn raise_descriptor_limit(most: u64) {
    let limit = getrlimit(Resource::Nofile);
    let to = limit.maximum.map_or(most, |hard| hard.min(most));
    if limit.current.is_some_and(|now| now < to) {
        // Where it is not allowed it stays as it was, and who finds none left says so.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(to), maximum: limit.maximum });
    }
}

/// Sees to it that as many descriptors as a communicator may come to have can be had, if the hard
/// limit allows that: the soft one is raised only where it would be in the way. That not even those
/// can be had that it has in any case is an error.
pub(crate) fn want_descriptors(ranks: usize, nics: usize) -> Result<()> {
    // Without /proc the limit stays, and who finds none left says so.
    let Ok(open) = std::fs::read_dir("/proc/self/fd").map(|all| all.count() as u64) else {
        return Ok(());
    };
    // A connection from each rank and one to each, what NICs take that are not open yet, and its
    // own.
    raise_descriptor_limit((2 * ranks as u64).saturating_add(open + 8 * nics as u64 + 16 + SPARE));
    // Those with its neighbours, one of each NIC, and its own.
    let least = 2 * ranks.saturating_sub(1).min(2) as u64 + nics as u64 + 2;
    match getrlimit(Resource::Nofile).current {
        // The one that looks is among those that are open.
        Some(limit) if limit + 1 < open + least => {
            let what = format!(
                "a communicator of {ranks} ranks takes {least} descriptors, and {} are open",
                open - 1
            );
            Err(io(what)(rustix::io::Errno::MFILE.into()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_want_of_descriptors_is_explained() {
        assert_eq!(descriptors(&std::io::ErrorKind::NotFound.into()), "");
        let none_left = std::io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        assert!(descriptors(&none_left).contains("`ulimit -n`"));
    }

    #[test]
    fn a_limit_that_is_high_enough_stays() {
        let before = getrlimit(Resource::Nofile);
        raise_descriptor_limit(3);
        assert_eq!(getrlimit(Resource::Nofile), before);
    }
}
