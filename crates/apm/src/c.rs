//! The C API: `include/unbroken/apm.h`.
//!
//! What a program holds are numbers that look like pointers: a handle that is wrong or old is not
//! found, and that is an error, never an access. Other pointers are checked for NULL and otherwise
//! believed, as in any C API. No panic crosses the boundary: it becomes an error.

mod structs;

use crate::error::{Error, Result};
use crate::handle::{self, now_us, Handle, OnEvent, OnOther, Options, Until};
use crate::machine::{Id, Settings, MAX_EVENTS, MAX_QPS};
use crate::thread;
use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Duration;
use structs::{CAddress, CEvent, CInfo, COptions, CPath};
use unbroken_verbs::abi::{ibv_async_event, ibv_context, ibv_qp};
use unbroken_verbs::handles::{Table, Wrong};

const LOAD_TIMEOUT_MS: u32 = 10_000;
const MIGRATE_TIMEOUT_MS: u32 = 2_000;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

static HANDLES: Table<Handle> = Table::new("handle", "unbapm_open");

impl From<Wrong> for Error {
    fn from(wrong: Wrong) -> Error {
        Error::invalid(wrong.to_string())
    }
}

/// Runs a function of the API: 0 or a number of `errno.h`, and the remembered error.
fn code(run: impl FnOnce() -> Result<()>) -> c_int {
    let defect = || Err(Error::new(libc::EIO, "a defect of this library: please report it"));
    let Err(error) = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| defect()) else {
        return 0;
    };
    // An error's text has no zero bytes.
    LAST.with(|last| *last.borrow_mut() = CString::new(error.text).unwrap_or_default());
    error.errno
}

/// The same with a handle; then the program is told what has happened, if no thread does that.
fn with(apm: *mut c_void, run: impl FnOnce(&Handle) -> Result<()>) -> c_int {
    code(|| {
        let it = HANDLES.get(apm)?;
        let done = run(&it);
        if it.options.no_thread {
            it.deliver();
        }
        done
    })
}

/// Where a result goes, which must not be NULL.
///
/// # Safety
/// It is NULL, or a value of that type may be written there.
unsafe fn put<T>(pointer: *mut T, name: &str, value: T) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::invalid(format!("{name} is NULL: it is where the result goes")));
    }
    // SAFETY: as the caller says.
    unsafe { pointer.write(value) };
    Ok(())
}

/// A list.
///
/// # Safety
/// It is NULL, or there are so many.
unsafe fn list<'a, T>(pointer: *const T, count: c_int, most: usize, name: &str) -> Result<&'a [T]> {
    let count = usize::try_from(count).ok().filter(|count| *count <= most);
    let count =
        count.ok_or_else(|| Error::invalid(format!("the number of {name} must be 0 to {most}")))?;
    if count > 0 && pointer.is_null() {
        return Err(Error::invalid(format!("{name} is NULL, and {count} are announced")));
    }
    // SAFETY: as the caller says; none of them need no memory.
    Ok(if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(pointer, count) } })
}

/// A list of queue pairs; `None`: all.
///
/// # Safety
/// It is NULL, or there are so many.
unsafe fn qps(pointer: *const *mut ibv_qp, count: c_int) -> Result<Option<Vec<Id>>> {
    if pointer.is_null() && count == 0 {
        return Ok(None);
    }
    // SAFETY: as the caller says.
    let qps = unsafe { list(pointer, count, MAX_QPS, "qps") }?;
    if let Some(i) = qps.iter().position(|qp| qp.is_null()) {
        return Err(Error::invalid(format!("qps[{i}] is NULL")));
    }
    Ok(Some(qps.iter().map(|qp| qp.expose_provenance()).collect()))
}

#[no_mangle]
extern "C" fn unbapm_last_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

#[no_mangle]
extern "C" fn unbapm_state_str(state: c_int) -> *const c_char {
    const NAMES: [&CStr; 6] =
        [c"UNLOADED", c"LOADING", c"REARM", c"ARMED", c"MIGRATING", c"FAILED"];
    usize::try_from(state).ok().and_then(|i| NAMES.get(i)).unwrap_or(&c"unknown state").as_ptr()
}

#[no_mangle]
extern "C" fn unbapm_event_str(event: c_int) -> *const c_char {
    const NAMES: [&CStr; 9] = [
        c"armed",
        c"migrated",
        c"migration failed",
        c"alternate path unhealthy",
        c"alternate path healthy",
        c"respecified",
        c"load late",
        c"load failed",
        c"queue pair failed",
    ];
    usize::try_from(event).ok().and_then(|i| NAMES.get(i)).unwrap_or(&c"unknown event").as_ptr()
}

/// What the program wants.
fn options(given: Option<&COptions>) -> Result<Options> {
    let usual = COptions::default();
    let o = given.unwrap_or(&usual);
    if o.size != size_of::<COptions>() {
        return Err(Error::invalid(format!(
            "options of {} bytes; UNBAPM_OPTIONS_INITIALIZER of this version's header makes {}",
            o.size,
            size_of::<COptions>()
        )));
    }
    let gid_index = u8::try_from(o.gid_index)
        .map_err(|_| Error::invalid(format!("gid_index is {}: 0 to 255 are right", o.gid_index)))?;
    let us = |ms: u32, usual: u32| u64::from(if ms == 0 { usual } else { ms }) * 1_000;
    let arg = Argument(o.arg);
    let on_event = o.on_event.map(|call| -> OnEvent {
        Box::new(move |event| {
            // SAFETY: the program's function, as the header has it; the event lives until it
            // returns.
            unsafe { call(arg.get(), &CEvent::of(event)) }
        })
    });
    let on_other = o.on_other.map(|call| -> OnOther {
        Box::new(move |event| {
            // SAFETY: as above.
            unsafe { call(arg.get(), event) }
        })
    });
    Ok(Options {
        settings: Settings {
            manual: o.manual != 0,
            respecify: o.respecify != 0,
            load_timeout_us: us(o.load_timeout_ms, LOAD_TIMEOUT_MS),
            migrate_timeout_us: us(o.migrate_timeout_ms, MIGRATE_TIMEOUT_MS),
        },
        no_thread: o.no_thread != 0,
        gid_index,
        armed_event: o.armed_event,
        on_event,
        on_other,
    })
}

/// The program's argument of its callbacks, which come from another thread.
#[derive(Clone, Copy)]
struct Argument(*mut c_void);

// SAFETY: nothing is done with it but to hand it back.
unsafe impl Send for Argument {}
// SAFETY: as above.
unsafe impl Sync for Argument {}

impl Argument {
    fn get(self) -> *mut c_void {
        self.0
    }
}

#[no_mangle]
extern "C" fn unbapm_open(
    context: *mut ibv_context,
    given: *const COptions,
    apm: *mut *mut c_void,
) -> c_int {
    code(|| {
        // SAFETY: the program gives NULL, or what apm.h says. Checked before anything is started.
        unsafe { put(apm, "apm", std::ptr::null_mut()) }?;
        if context.is_null() {
            return Err(Error::invalid("context is NULL: ibv_open_device gives one"));
        }
        // SAFETY: as above.
        let options = options(unsafe { given.as_ref() })?;
        let no_thread = options.no_thread;
        // SAFETY: as above.
        let it = Arc::new(unsafe { Handle::open(context, options) }?);
        if !no_thread {
            thread::start(&it)?;
        }
        // SAFETY: as above.
        unsafe { put(apm, "apm", HANDLES.insert(it)) }
    })
}

#[no_mangle]
extern "C" fn unbapm_close(apm: *mut c_void) -> c_int {
    code(|| {
        let it = HANDLES.get(apm)?;
        if it.is_own_thread() {
            return Err(Error::new(
                libc::EDEADLK,
                "unbapm_close in a callback would wait for itself",
            ));
        }
        let it = HANDLES.take(apm)?;
        thread::stop(&it);
        it.remove(&it.all(None))
    })
}

#[no_mangle]
extern "C" fn unbapm_add(apm: *mut c_void, list: *const *mut ibv_qp, count: c_int) -> c_int {
    with(apm, |it| {
        // SAFETY: the program gives what apm.h says.
        let ids = unsafe { qps(list, count) }?;
        it.add(
            &ids.ok_or_else(|| Error::invalid("qps is NULL: there is no list of all to be added"))?,
        )
    })
}

#[no_mangle]
extern "C" fn unbapm_remove(apm: *mut c_void, list: *const *mut ibv_qp, count: c_int) -> c_int {
    // SAFETY: the program gives what apm.h says.
    with(apm, |it| it.remove(&it.all(unsafe { qps(list, count) }?)))
}

#[no_mangle]
extern "C" fn unbapm_specify(
    apm: *mut c_void,
    qp_list: *const *mut ibv_qp,
    count: c_int,
    paths: *const CPath,
    path_count: c_int,
) -> c_int {
    with(apm, |it| {
        // SAFETY: the program gives what apm.h says.
        let (ids, paths) =
            unsafe { (qps(qp_list, count)?, list(paths, path_count, MAX_QPS, "paths")?) };
        it.specify(&it.all(ids), &paths.iter().map(CPath::get).collect::<Vec<_>>())
    })
}

#[no_mangle]
extern "C" fn unbapm_choose(
    apm: *mut c_void,
    qp_list: *const *mut ibv_qp,
    count: c_int,
    peer: *const CAddress,
    address_count: c_int,
) -> c_int {
    with(apm, |it| {
        // SAFETY: the program gives what apm.h says. A device has 255 ports at most.
        let (ids, peer) =
            unsafe { (qps(qp_list, count)?, list(peer, address_count, 255, "addresses")?) };
        it.choose(&it.all(ids), &peer.iter().map(CAddress::get).collect::<Vec<_>>())
    })
}

/// Writes as many as there is room for, and says how many.
///
/// # Safety
/// Both are NULL, or as the header says.
unsafe fn fill<T>(to: *mut T, count: *mut c_int, items: impl Iterator<Item = T>) -> Result<()> {
    let mut written = 0;
    for item in items {
        // SAFETY: the caller has looked at the room that there is.
        unsafe { to.add(written).write(item) };
        written += 1;
    }
    // SAFETY: as the caller says.
    unsafe { put(count, "count", written as c_int) }
}

/// The room that there is in a list.
///
/// # Safety
/// Both are NULL, or as the header says.
unsafe fn room<T>(to: *mut T, count: *mut c_int, name: &str) -> Result<usize> {
    // SAFETY: as the caller says.
    let room = unsafe { count.as_ref() }.copied();
    let room = room.ok_or_else(|| {
        Error::invalid("count is NULL: it is the room in the list, and how many there are")
    })?;
    match usize::try_from(room) {
        Ok(room) if room == 0 || !to.is_null() => Ok(room),
        Ok(_) => Err(Error::invalid(format!("{name} is NULL: it is where the results go"))),
        Err(_) => Err(Error::invalid(format!("*count is {room}: it is the room in the list"))),
    }
}

#[no_mangle]
extern "C" fn unbapm_addresses(apm: *mut c_void, to: *mut CAddress, count: *mut c_int) -> c_int {
    with(apm, |it| {
        // SAFETY: the program gives what apm.h says.
        let room = unsafe { room(to, count, "list") }?;
        let found = it.addresses()?;
        if found.len() > room {
            return Err(Error::new(
                libc::ENOSPC,
                format!("the device has {} ports, and the list room for {room}", found.len()),
            ));
        }
        // SAFETY: as above.
        unsafe { fill(to, count, found.iter().map(CAddress::of)) }
    })
}

#[no_mangle]
extern "C" fn unbapm_set_process(
    apm: *mut c_void,
    list: *const *mut ibv_qp,
    count: c_int,
    process: u64,
) -> c_int {
    // SAFETY: the program gives what apm.h says.
    with(apm, |it| it.set_process(&it.all(unsafe { qps(list, count) }?), process))
}

#[no_mangle]
extern "C" fn unbapm_of_processes(
    apm: *mut c_void,
    processes: *const u64,
    process_count: c_int,
    to: *mut *mut ibv_qp,
    count: *mut c_int,
) -> c_int {
    with(apm, |it| {
        // SAFETY: the program gives what apm.h says.
        let found =
            it.of_processes(unsafe { list(processes, process_count, MAX_QPS, "processes") }?)?;
        if to.is_null() {
            // SAFETY: as above.
            return unsafe { put(count, "count", found.len() as c_int) };
        }
        // SAFETY: as above.
        let room = unsafe { room(to, count, "qps") }?;
        if found.len() > room {
            let text =
                format!("{} queue pairs lead there, and the list has room for {room}", found.len());
            return Err(Error::new(libc::ENOSPC, text));
        }
        // SAFETY: as above.
        unsafe { fill(to, count, found.into_iter().map(handle::qp)) }
    })
}

#[no_mangle]
extern "C" fn unbapm_load(apm: *mut c_void, list: *const *mut ibv_qp, count: c_int) -> c_int {
    // SAFETY: the program gives what apm.h says.
    with(apm, |it| it.load(&it.all(unsafe { qps(list, count) }?)))
}

#[no_mangle]
extern "C" fn unbapm_migrate(apm: *mut c_void, list: *const *mut ibv_qp, count: c_int) -> c_int {
    // SAFETY: the program gives what apm.h says.
    with(apm, |it| it.migrate(&it.all(unsafe { qps(list, count) }?)))
}

#[no_mangle]
extern "C" fn unbapm_wait(
    apm: *mut c_void,
    list: *const *mut ibv_qp,
    count: c_int,
    until: c_int,
    how: c_int,
    timeout_ms: u32,
) -> c_int {
    with(apm, |it| {
        let until = match until {
            0 => Until::Armed,
            1 => Until::Migrated,
            _ => {
                return Err(Error::invalid(format!(
                    "until is {until}: UNBAPM_UNTIL_ARMED (0) and _MIGRATED (1) exist"
                )))
            }
        };
        if !(0..=1).contains(&how) {
            return Err(Error::invalid(format!(
                "how is {how}: UNBAPM_BY_EVENT (0) and UNBAPM_BY_QUERY (1) exist"
            )));
        }
        // SAFETY: the program gives what apm.h says.
        let ids = it.all(unsafe { qps(list, count) }?);
        it.wait(&ids, until, how == 1, Duration::from_millis(timeout_ms.into()))
    })
}

#[no_mangle]
extern "C" fn unbapm_query(apm: *mut c_void, qp: *mut ibv_qp, info: *mut CInfo) -> c_int {
    with(apm, |it| {
        let known = it.info(qp.expose_provenance())?;
        // SAFETY: the program gives NULL, or what apm.h says.
        unsafe { put(info, "info", CInfo::of(&known)) }
    })
}

#[no_mangle]
extern "C" fn unbapm_fd(apm: *mut c_void, fd: *mut c_int) -> c_int {
    // SAFETY: the program gives NULL, or what apm.h says.
    with(apm, |it| unsafe { put(fd, "fd", it.fd()) })
}

#[no_mangle]
extern "C" fn unbapm_poll_events(apm: *mut c_void, to: *mut CEvent, count: *mut c_int) -> c_int {
    with(apm, |it| {
        // SAFETY: the program gives what apm.h says.
        let room = unsafe { room(to, count, "events") }?;
        if it.options.on_event.is_some() {
            return Err(Error::invalid("events go to on_event"));
        }
        let (taken, lost) = it.take_events(room);
        // SAFETY: as above.
        unsafe { fill(to, count, taken.iter().map(CEvent::of)) }?;
        if lost {
            return Err(Error::new(
                libc::ENOBUFS,
                format!("more than {MAX_EVENTS} events waited, and the oldest are lost"),
            ));
        }
        Ok(())
    })
}

#[no_mangle]
extern "C" fn unbapm_handle_event(
    apm: *mut c_void,
    event: *const ibv_async_event,
    taken: *mut c_int,
) -> c_int {
    with(apm, |it| {
        if !it.options.no_thread {
            return Err(Error::invalid(
                "the library's thread reads the events: set no_thread in the options of \
                 unbapm_open",
            ));
        }
        // SAFETY: the program gives NULL, or an event that it has not acknowledged.
        let event = unsafe { event.as_ref() }.ok_or_else(|| Error::invalid("event is NULL"))?;
        // SAFETY: as above.
        let was_ours = unsafe { it.take_in(event) };
        if !taken.is_null() {
            // SAFETY: as above.
            unsafe { taken.write(was_ours.into()) };
        }
        it.progress();
        Ok(())
    })
}

#[no_mangle]
extern "C" fn unbapm_progress(apm: *mut c_void, next_us: *mut u64) -> c_int {
    with(apm, |it| {
        if !it.options.no_thread {
            return Err(Error::invalid(
                "the library's thread does it: set no_thread in the options of unbapm_open",
            ));
        }
        let next = it.progress();
        if !next_us.is_null() {
            // SAFETY: the program gives NULL, or what apm.h says.
            unsafe { next_us.write(next.map_or(u64::MAX, |at_us| at_us.saturating_sub(now_us()))) };
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::state_name;
    use crate::machine::State;

    fn said() -> String {
        // SAFETY: the library's own string.
        unsafe { CStr::from_ptr(unbapm_last_error()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn names_are_those_of_the_errors() {
        for (state, number) in [(State::Unloaded, 0), (State::Armed, 3), (State::Failed, 5)] {
            // SAFETY: the library's own string.
            let name = unsafe { CStr::from_ptr(unbapm_state_str(number)) };
            assert_eq!(name.to_str(), Ok(state_name(state)));
        }
        // SAFETY: the library's own string.
        assert_eq!(unsafe { CStr::from_ptr(unbapm_state_str(-1)) }, c"unknown state");
    }

    #[test]
    fn what_is_no_handle_is_refused() {
        let nothing = std::ptr::without_provenance_mut(0x10);
        assert_eq!(unbapm_load(nothing, std::ptr::null(), 0), libc::EINVAL);
        assert!(
            said().contains("0x10 is no handle") && said().contains("unbapm_open"),
            "{}",
            said()
        );
        assert_eq!(unbapm_close(nothing), libc::EINVAL);
        let mut apm = std::ptr::null_mut();
        assert_eq!(unbapm_open(std::ptr::null_mut(), std::ptr::null(), &mut apm), libc::EINVAL);
        assert!(said().contains("context is NULL"), "{}", said());
    }
}
