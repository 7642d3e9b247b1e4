//! Communicators and their ids.

use std::ffi::{c_char, c_void};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ptr::{null, null_mut};
use std::time::Duration;

use unbroken_environment as environment;
use unbroken_runtime::Runtime;
use unbroken_schedule::{Folding, Form};

use super::table::COMMS;
use super::{code, given, group, hosts, of, put, refuse, text, Code, SUCCESS};
use crate::bootstrap::{Bootstrap, Id};
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::numa::Numa;
use crate::options::Options;

/// Bytes of `ubcollUniqueId`.
const ID_BYTES: usize = 128;
/// Where this process is reached, if its programs do not say.
const ADDRESS_VARIABLE: &str = "UNBROKEN_COLL_ADDRESS";
/// How long an id that nobody has come by stays good; ranks that have come wait for as long as they
/// say.
const ID_LASTS: Duration = Duration::from_secs(24 * 3600);

/// `ubcollUniqueId`: the id's text, and zeros.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId {
    internal: [u8; ID_BYTES],
}

/// `ubcollConfig_t`
#[repr(C)]
struct Config {
    size: usize,
    host: *const c_char,
    address: *const c_char,
    timeout_ms: u32,
    patience_ms: u32,
    queue: u32,
    any_order: i32,
    logical: i32,
    shape: *const c_char,
}

impl Config {
    /// Of a program that gives none.
    fn usual() -> Config {
        Config {
            size: size_of::<Config>(),
            host: null(),
            address: null(),
            timeout_ms: 0,
            patience_ms: 0,
            queue: 0,
            any_order: 0,
            logical: 0,
            shape: null(),
        }
    }

    /// Changes options as it says. Gives the host, and the address of this machine, if they are
    /// named.
    fn apply(&self, options: &mut Options) -> Result<(Option<String>, Option<String>)> {
        if self.size != size_of::<Config>() {
            return refuse(format!(
                "a configuration of {} bytes; UBCOLL_CONFIG_INITIALIZER of this version's header \
                 makes one of {}",
                self.size,
                size_of::<Config>()
            ));
        }
        let set = |field: &mut Duration, ms: u32| {
            if ms > 0 {
                *field = Duration::from_millis(ms.into());
            }
        };
        set(&mut options.timeout, self.timeout_ms);
        // Who lets operations wait for long lets ranks be as late.
        options.patience = options.patience.max(options.timeout);
        set(&mut options.patience, self.patience_ms);
        if self.queue > 0 {
            options.queue = self.queue as usize;
        }
        options.logical = self.logical != 0 || environment::flag(environment::COLL_LOGICAL);
        let any_order = self.any_order != 0 || environment::flag(environment::COLL_ANY_ORDER);
        options.folding = if any_order { Folding::Any } else { Folding::InOrder };
        // SAFETY: the program gives NULL or a string.
        if let Some(name) = unsafe { text(self.shape) } {
            options.shape = Some(name.parse().map_err(Error::Refused)?);
        }
        // SAFETY: the program gives NULL or strings.
        Ok(unsafe { (text(self.host), text(self.address)) })
    }
}

/// `ubcollCounters_t`
#[repr(C)]
struct CounterValues {
    operations: u64,
    paths_failed: u64,
    streams_moved: u64,
    frames_again: u64,
}

/// The address at which others reach this process.
fn address(given: Option<String>) -> Result<IpAddr> {
    let Some(text) = given.or_else(|| std::env::var(ADDRESS_VARIABLE).ok()) else {
        return Ok(Ipv4Addr::LOCALHOST.into());
    };
    text.parse().map_err(|_| {
        Error::Refused(format!(
            "`{text}` is no address at which others reach this process: an IP address of this \
             machine is right"
        ))
    })
}

#[no_mangle]
extern "C" fn ubcollGetUniqueId(id: *mut UniqueId) -> Code {
    code(|| {
        let at = SocketAddr::new(address(None)?, 0);
        let text = Bootstrap::listen(at, ID_LASTS)?.id().to_string();
        let mut internal = [0; ID_BYTES];
        // An address and 32 digits are shorter by far.
        internal[..text.len()].copy_from_slice(text.as_bytes());
        // SAFETY: the program gives NULL, or what coll.h says.
        unsafe { put(id, "uniqueId", UniqueId { internal }) }
    })
}

fn join(ranks: i32, id: UniqueId, rank: i32, config: Option<&Config>) -> Result<Communicator> {
    let text_of_id: Vec<u8> = id.internal.iter().copied().take_while(|byte| *byte != 0).collect();
    let id: Id = String::from_utf8_lossy(&text_of_id).parse()?;
    let (Ok(count @ 1..), Ok(number)) = (usize::try_from(ranks), usize::try_from(rank)) else {
        return refuse(format!(
            "rank {rank} of {ranks}: ranks are counted from 0, and there is one at least"
        ));
    };
    let shape = environment::text(environment::COLL_SHAPE);
    let shape = shape.map(|name| name.trim().parse::<Form>()).transpose();
    let shape =
        shape.map_err(|why| Error::Refused(format!("{}: {why}", environment::COLL_SHAPE)))?;
    let mut options = Options { shape, numa: Numa::from_env()?, ..Options::default() };
    let (host, at) = config.unwrap_or(&Config::usual()).apply(&mut options)?;
    let runtime = Runtime::open().map_err(|e| Error::Refused(e.to_string()))?;
    options.status_folder = Some(runtime.path().join("coll"));
    let host = hosts::open(runtime.path(), host)?;
    Communicator::join_at(&id, number, count, &host, address(at)?, options)
}

#[no_mangle]
extern "C" fn ubcollCommInitRankConfig(
    comm: *mut *mut c_void,
    ranks: i32,
    id: UniqueId,
    rank: i32,
    config: *const Config,
) -> Code {
    code(|| {
        // SAFETY: the program gives NULL, or what coll.h says. Checked before anybody is met.
        unsafe { put(comm, "comm", null_mut()) }?;
        if group::is_open() {
            return refuse("communicators are made outside of groups, each in a thread of its own");
        }
        // SAFETY: as above.
        let joined = join(ranks, id, rank, unsafe { config.as_ref() })?;
        // SAFETY: as above.
        unsafe { put(comm, "comm", COMMS.add(joined)) }
    })
}

#[no_mangle]
extern "C" fn ubcollCommInitRank(
    comm: *mut *mut c_void,
    ranks: i32,
    id: UniqueId,
    rank: i32,
) -> Code {
    ubcollCommInitRankConfig(comm, ranks, id, rank, std::ptr::null())
}

#[no_mangle]
extern "C" fn ubcollCommSplit(
    comm: *mut c_void,
    colour: i32,
    key: i32,
    new: *mut *mut c_void,
    config: *const Config,
) -> Code {
    code(|| {
        // SAFETY: the program gives NULL, or what coll.h says. Checked before anything is said.
        unsafe { put(new, "newcomm", null_mut()) }?;
        if group::is_open() {
            return refuse("a communicator is split outside of groups");
        }
        let it = COMMS.get(comm)?;
        let mut options = it.options.clone();
        // SAFETY: the program gives NULL, or what coll.h says.
        let named =
            unsafe { config.as_ref() }.map(|config| config.apply(&mut options)).transpose()?;
        let (host, at) = named.unwrap_or_default();
        if let Some(host) = host {
            return refuse(format!(
                "host `{host}` for a rank of a communicator that is split; it stays where it is: \
                 NULL"
            ));
        }
        let at = at.map_or(Ok(it.site.at), |text| address(Some(text)))?;
        match it.split_at(u32::try_from(colour).ok(), key, at, options)? {
            // SAFETY: as above.
            Some(split) => unsafe { put(new, "newcomm", COMMS.add(split)) },
            None => Ok(()),
        }
    })
}

#[no_mangle]
extern "C" fn ubcollCommFinalize(comm: *mut c_void) -> Code {
    code(|| {
        if group::is_open() {
            return refuse("a group is open: ubcollGroupEnd comes first");
        }
        COMMS.get(comm)?.finalize();
        Ok(())
    })
}

#[no_mangle]
extern "C" fn ubcollCommDestroy(comm: *mut c_void) -> Code {
    code(|| {
        if group::is_open() {
            return refuse("a group is open: ubcollGroupEnd comes first");
        }
        COMMS.take(comm)?;
        Ok(())
    })
}

#[no_mangle]
extern "C" fn ubcollCommAbort(comm: *mut c_void) -> Code {
    code(|| {
        let it = COMMS.take(comm)?;
        it.abort();
        Ok(())
    })
}

#[no_mangle]
extern "C" fn ubcollCommSetTimeout(comm: *mut c_void, timeout_ms: u32) -> Code {
    code(|| {
        if timeout_ms == 0 {
            return refuse("a timeout of 0 ms; 1 ms or more is right");
        }
        COMMS.get(comm)?.set_timeout(Duration::from_millis(timeout_ms.into()));
        Ok(())
    })
}

#[no_mangle]
extern "C" fn ubcollCommGetAsyncError(comm: *mut c_void, result: *mut Code) -> Code {
    code(|| {
        let failure = COMMS.get(comm)?.failure();
        let state = match failure {
            None => SUCCESS,
            Some(failure) => {
                let error = Error::Broken(failure);
                // Its text is what ubcollGetLastError gives then.
                code(|| Err(Error::Refused(error.to_string())));
                of(&error)
            }
        };
        // SAFETY: the program gives NULL, or what coll.h says.
        unsafe { put(result, "asyncError", state) }
    })
}

#[no_mangle]
extern "C" fn ubcollCommCount(comm: *mut c_void, count: *mut i32) -> Code {
    // SAFETY: the program gives NULL, or what coll.h says.
    code(|| unsafe { put(count, "count", COMMS.get(comm)?.ranks() as i32) })
}

#[no_mangle]
extern "C" fn ubcollCommUserRank(comm: *mut c_void, rank: *mut i32) -> Code {
    // SAFETY: the program gives NULL, or what coll.h says.
    code(|| unsafe { put(rank, "rank", COMMS.get(comm)?.rank() as i32) })
}

#[no_mangle]
extern "C" fn ubcollCommGetCounters(comm: *mut c_void, counters: *mut CounterValues) -> Code {
    code(|| {
        let c = COMMS.get(comm)?.counters();
        let values = CounterValues {
            operations: c.operations,
            paths_failed: c.failures,
            streams_moved: c.moves,
            frames_again: c.again,
        };
        // SAFETY: the program gives NULL, or what coll.h says.
        unsafe { put(counters, "counters", values) }
    })
}

/// A structure that a program has given, for functions beside.
pub(super) fn rank_of(number: i32, name: &str) -> Result<usize> {
    usize::try_from(number)
        .map_err(|_| Error::Refused(format!("{name} {number}: ranks are counted from 0")))
}

/// An array of so many counts.
///
/// # Safety
/// It is NULL, or there are so many.
pub(super) unsafe fn counts<'a>(
    pointer: *const usize,
    ranks: usize,
    name: &str,
) -> Result<&'a [usize]> {
    // SAFETY: as the caller says.
    let first = unsafe { given(pointer, name) }?;
    // SAFETY: as the caller says.
    Ok(unsafe { std::slice::from_raw_parts(first, ranks) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_takes_every_shape() {
        let values = environment::variable(environment::COLL_SHAPE).unwrap().values;
        assert_eq!(values.right(), Form::names());
    }
}
