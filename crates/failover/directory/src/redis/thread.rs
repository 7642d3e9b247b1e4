//! The thread that talks to the server: connects, runs rounds, and waits for a while when there is
//! trouble.

use std::time::Duration;

use super::command::{Connect, Store};
use super::shared::Shared;
use crate::directory::News;

/// After the first failure to connect the next try comes so much later; the time doubles until a
/// try succeeds.
const RETRY: Duration = Duration::from_millis(50);
/// ... up to this.
const MAX_RETRY: Duration = Duration::from_secs(1);
/// A time to wait is longer or shorter by up to this part of it, so that the processes of a cluster
/// do not all come back at the same instant.
const SPREAD: u32 = 4;

/// Runs until the directory is closed.
pub(super) fn run(shared: &Shared, mut connect: Box<dyn Connect>) {
    // A defect must not leave those behind who wait for answers.
    let _guard = Guard(shared);
    let mut retry = RETRY;
    let mut dice = shared.now_ms() as u32 ^ std::process::id();
    loop {
        let why = match connect.connect() {
            Ok(mut store) => {
                shared.lock().connected();
                let rounds = shared.lock().rounds();
                match serve(shared, &mut *store) {
                    None => return,
                    Some(why) => {
                        // More than a greeting: it is no server that only seems to be there.
                        if shared.lock().rounds() > rounds + 1 {
                            retry = RETRY;
                        }
                        why
                    }
                }
            }
            Err(why) => why,
        };
        trouble(shared, &why);
        dice = dice.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let spread = retry / SPREAD;
        let wait = retry - spread + 2 * spread * (dice >> 24) / 256;
        retry = (2 * retry).min(MAX_RETRY);
        let book = shared.lock();
        let waited = shared.work.wait_timeout_while(book, wait, |book| !book.closed());
        if waited.unwrap_or_else(std::sync::PoisonError::into_inner).0.closed() {
            return;
        }
    }
}

/// Runs rounds over a connection until there is trouble with it, of which it gives the words; or,
/// with `None`, until the directory is closed.
fn serve(shared: &Shared, store: &mut dyn Store) -> Option<String> {
    loop {
        let mut book = shared.lock();
        let round = loop {
            if book.closed() {
                return None;
            }
            let now_ms = shared.now_ms();
            if let Some(round) = book.next(now_ms) {
                break round;
            }
            let wait = Duration::from_millis(book.deadline_ms().saturating_sub(now_ms).max(1));
            let waited = shared
                .work
                .wait_timeout_while(book, wait, |book| !book.pending() && !book.closed());
            book = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        };
        drop(book);
        let replies = match store.run(&round.commands) {
            Ok(replies) => replies,
            Err(why) => return Some(why),
        };
        let answered = shared.lock().answer(shared.now_ms(), &round, &replies);
        shared.done.notify_all();
        match answered {
            Ok(news) => news.into_iter().for_each(&*shared.news),
            Err(why) => return Some(why),
        }
    }
}

fn trouble(shared: &Shared, why: &str) {
    let news: Option<News> = shared.lock().trouble(why);
    shared.done.notify_all();
    news.into_iter().for_each(&*shared.news);
}

struct Guard<'a>(&'a Shared);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            trouble(self.0, "the thread that asks it has ended by a defect");
        } else {
            self.0.done.notify_all();
        }
    }
}
