//! Groups, requests, and queues of those that are over.
//!
//! Outside of a group an operation is begun at once; without a request its caller waits. Inside, it
//! is put aside until the group ends.

use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use super::table::{QUEUES, REQUESTS};
use super::{code, put, refuse, Code};
use crate::communicator::Communicator;
use crate::completions::Completions;
use crate::error::Result;
use crate::group::{begin, Entry};
use crate::request::Request;

/// Groups inside of groups.
const MAX_DEPTH: u32 = 64;
/// Operations of a group.
const MAX_OPERATIONS: usize = 1 << 16;

/// An operation, and where its request goes; NULL: it is waited for.
type Aside = (Entry<Arc<Communicator>>, *mut *mut c_void);

/// A thread's group.
#[derive(Default)]
struct Open {
    depth: u32,
    entries: Vec<Aside>,
    /// Why one of them was refused.
    refused: Option<String>,
}

thread_local! {
    static OPEN: RefCell<Open> = RefCell::default();
}

/// Whether this thread has a group.
pub(super) fn is_open() -> bool {
    OPEN.with(|open| open.borrow().depth > 0)
}

/// Takes an operation that a program asks for.
///
/// # Safety
/// `request` is NULL or a request may be written there, now and until the group ends; the
/// operation's memory stays as coll.h says.
pub(super) unsafe fn ask(
    entry: Result<Entry<Arc<Communicator>>>,
    request: *mut *mut c_void,
) -> Result<()> {
    if is_open() {
        return OPEN.with(|open| put_aside(&mut open.borrow_mut(), entry, request));
    }
    let entry = entry?;
    if !request.is_null() {
        // SAFETY: as the caller says. Checked before anything is begun.
        unsafe { put(request, "request", null_mut()) }?;
    }
    let begun = begin(vec![entry])?;
    // SAFETY: as the caller says.
    unsafe { hand_out(begun, &[request]) }
}

fn put_aside(
    open: &mut Open,
    entry: Result<Entry<Arc<Communicator>>>,
    request: *mut *mut c_void,
) -> Result<()> {
    let entry = entry.and_then(|entry| match open.entries.len() < MAX_OPERATIONS {
        true => Ok(entry),
        false => {
            refuse(format!("a group of more than {MAX_OPERATIONS} operations; end it earlier"))
        }
    });
    match entry {
        Ok(entry) => {
            open.entries.push((entry, request));
            Ok(())
        }
        Err(error) => {
            open.refused.get_or_insert_with(|| error.to_string());
            Err(error)
        }
    }
}

/// Requests go to who wants them; the others are waited for.
///
/// # Safety
/// Each place is NULL, or a request may be written there.
unsafe fn hand_out(begun: Vec<Request>, places: &[*mut *mut c_void]) -> Result<()> {
    let mut waited = Vec::new();
    for (request, place) in begun.into_iter().zip(places) {
        if place.is_null() {
            waited.push(request);
        } else {
            // SAFETY: as the caller says.
            unsafe { put(*place, "request", REQUESTS.add(request)) }?;
        }
    }
    Request::wait_all(waited).map(drop)
}

#[no_mangle]
extern "C" fn ubcollGroupStart() -> Code {
    code(|| {
        OPEN.with(|open| {
            let mut open = open.borrow_mut();
            if open.depth == MAX_DEPTH {
                return refuse(format!(
                    "{MAX_DEPTH} groups are open in each other; ubcollGroupEnd ends one"
                ));
            }
            open.depth += 1;
            Ok(())
        })
    })
}

#[no_mangle]
extern "C" fn ubcollGroupEnd() -> Code {
    code(|| {
        let ended = OPEN.with(|open| {
            let mut open = open.borrow_mut();
            if open.depth == 0 {
                return refuse("no group is open; ubcollGroupStart opens one");
            }
            open.depth -= 1;
            Ok((open.depth == 0).then(|| std::mem::take(&mut *open)))
        })?;
        let Some(group) = ended else { return Ok(()) };
        if let Some(why) = group.refused {
            return refuse(format!(
                "nothing of the group was begun, since an operation was refused: {why}"
            ));
        }
        let (entries, places): (Vec<_>, Vec<_>) = group.entries.into_iter().unzip();
        let begun = begin(entries)?;
        // SAFETY: as `ask` was promised.
        unsafe { hand_out(begun, &places) }
    })
}

/// Looks at a request; one that is over is given back.
fn look(request: *mut c_void, look: impl FnOnce(&Request) -> Result<bool>) -> Result<bool> {
    let it = REQUESTS.get(request)?;
    let over = look(&it);
    if !matches!(over, Ok(false)) {
        // Another thread may have been faster.
        let _ = REQUESTS.take(request);
    }
    over
}

#[no_mangle]
extern "C" fn ubcollRequestTest(request: *mut c_void, done: *mut i32) -> Code {
    code(|| {
        // SAFETY: the program gives NULL, or what coll.h says. Checked before the request can be
        // given back.
        unsafe { put(done, "done", 0) }?;
        let over = look(request, Request::test)?;
        // SAFETY: as above.
        unsafe { put(done, "done", i32::from(over)) }
    })
}

#[no_mangle]
extern "C" fn ubcollRequestWait(request: *mut c_void) -> Code {
    code(|| look(request, |it| Request::finish(vec![it]).map(|()| true)).map(drop))
}

#[no_mangle]
extern "C" fn ubcollRequestSleep(request: *mut c_void, timeout_ms: u32, done: *mut i32) -> Code {
    code(|| {
        // SAFETY: the program gives NULL, or what coll.h says. Checked before the request can be
        // given back.
        unsafe { put(done, "done", 0) }?;
        let over = look(request, |it| it.sleep(Duration::from_millis(timeout_ms.into())))?;
        // SAFETY: as above.
        unsafe { put(done, "done", i32::from(over)) }
    })
}

#[no_mangle]
extern "C" fn ubcollRequestWaitAll(requests: *const *mut c_void, count: usize) -> Code {
    code(|| {
        if count == 0 {
            return Ok(());
        }
        if requests.is_null() {
            return refuse("requests is NULL");
        }
        // SAFETY: not NULL, so the program gives so many.
        let handles = unsafe { std::slice::from_raw_parts(requests, count) };
        let mut first = Ok(());
        for handle in handles {
            // All are driven by their communicators' threads while one is waited for.
            let outcome = look(*handle, |it| Request::finish(vec![it]).map(|()| true)).map(drop);
            first = first.and(outcome);
        }
        first
    })
}

/// Milliseconds of the API: the largest number stands for no limit.
fn most(timeout_ms: u32) -> Duration {
    match timeout_ms {
        u32::MAX => Duration::MAX,
        ms => Duration::from_millis(ms.into()),
    }
}

#[no_mangle]
extern "C" fn ubcollRequestDrive(request: *mut c_void, timeout_ms: u32, done: *mut i32) -> Code {
    code(|| {
        let over = REQUESTS.get(request)?.drive(most(timeout_ms));
        // SAFETY: the program gives NULL, or what coll.h says.
        unsafe { put(done, "done", i32::from(over)) }
    })
}

#[no_mangle]
extern "C" fn ubcollRequestResult(request: *mut c_void) -> Code {
    code(|| match REQUESTS.get(request)?.test()? {
        true => Ok(()),
        false => refuse("the request is under way: ubcollRequestDrive says when it is over"),
    })
}

#[no_mangle]
extern "C" fn ubcollRequestSource(request: *mut c_void, rank: *mut i32) -> Code {
    code(|| {
        let source = REQUESTS.get(request)?.source();
        // SAFETY: the program gives NULL, or what coll.h says. Ranks are fewer than i32 has
        // numbers.
        unsafe { put(rank, "rank", source.map_or(-1, |rank| rank as i32)) }
    })
}

#[no_mangle]
extern "C" fn ubcollRequestNotify(request: *mut c_void, queue: *mut c_void, tag: u64) -> Code {
    code(|| {
        let queue = QUEUES.get(queue)?;
        REQUESTS.get(request)?.notify(&queue, tag);
        Ok(())
    })
}

#[no_mangle]
extern "C" fn ubcollQueueCreate(queue: *mut *mut c_void) -> Code {
    code(|| {
        // SAFETY: the program gives NULL, or what coll.h says. Checked before one is made.
        unsafe { put(queue, "queue", null_mut()) }?;
        // SAFETY: as above.
        unsafe { put(queue, "queue", QUEUES.insert(Completions::new())) }
    })
}

#[no_mangle]
extern "C" fn ubcollQueueWait(
    queue: *mut c_void,
    timeout_ms: u32,
    tag: *mut u64,
    got: *mut i32,
) -> Code {
    code(|| {
        // SAFETY: the program gives NULL, or what coll.h says. Checked before a tag is taken.
        unsafe { put(tag, "tag", 0).and_then(|()| put(got, "got", 0)) }?;
        let Some(next) = QUEUES.get(queue)?.take(most(timeout_ms)) else { return Ok(()) };
        // SAFETY: as above.
        unsafe { put(tag, "tag", next).and_then(|()| put(got, "got", 1)) }
    })
}

#[no_mangle]
extern "C" fn ubcollQueueDestroy(queue: *mut c_void) -> Code {
    code(|| {
        QUEUES.take(queue)?.close();
        Ok(())
    })
}
