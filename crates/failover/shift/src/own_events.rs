//! Events that a verb of the program's own raises.
//!
//! A device tells of events under its lock, from whatever thread, and the worker passes them on. To
//! wake it takes several times as long as a migration by request does. So the events that a call
//! raises about its own QP are kept aside for the thread that calls, which passes them on when it
//! has let go of the QP's gate: they are there when the verb returns. What it raises about other
//! QPs is the worker's.

use std::cell::RefCell;
use unbroken_verbs::QpEvent;

/// A physical QP: the process's part that it belongs to (there may be several hosts in one
/// process), its NIC, its QPN.
pub(crate) type Name = (usize, usize, u32);

thread_local! {
    /// The QP that this thread is at, and what was told of it.
    static AT: RefCell<Option<(Name, Vec<QpEvent>)>> = const { RefCell::new(None) };
}

/// Does something with a QP, and gives what it told of itself meanwhile, in this thread.
pub(crate) fn collect<T>(of: Name, run: impl FnOnce() -> T) -> (T, Vec<QpEvent>) {
    // An empty vector has no memory. At the end of the process nothing can be kept any more: the
    // worker passes it on.
    let set = |value| AT.try_with(|at| at.replace(value)).ok().flatten();
    set(Some((of, Vec::new())));
    let done = run();
    (done, set(None).map_or_else(Vec::new, |(_, told)| told))
}

/// Keeps an event aside if the thread is at that QP; gives whether it is.
pub(crate) fn keep(of: Name, event: QpEvent) -> bool {
    let kept = AT.try_with(|at| match &mut *at.borrow_mut() {
        Some((name, told)) if *name == of => {
            told.push(event);
            true
        }
        _ => false,
    });
    kept.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_call_raises_about_its_own_qp_alone_is_kept_for_it() {
        let (done, told) = collect((1, 0, 7), || {
            let ours = keep((1, 0, 7), QpEvent::PathMigrated);
            let others =
                [(1, 0, 8), (1, 1, 7), (2, 0, 7)].map(|name| keep(name, QpEvent::PathMigrated));
            let elsewhere =
                std::thread::spawn(|| keep((1, 0, 7), QpEvent::PathMigrated)).join().unwrap();
            (ours, others, elsewhere)
        });
        assert_eq!((done, told), ((true, [false; 3], false), vec![QpEvent::PathMigrated]));
        assert!(!keep((1, 0, 7), QpEvent::PathMigrated));
    }
}
