//! A bar for what takes long.

use std::io::IsTerminal;
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use unbroken_simulations::Watch;

/// What is done sooner has none.
const SOON: Duration = Duration::from_secs(2);
/// How often it is drawn.
const AGAIN: Duration = Duration::from_millis(200);

/// Does some work of which `watch` tells; beside it a bar on stderr, if somebody looks at it, once
/// it takes long. `what` names the parts of the work.
pub(super) fn beside<T>(watch: &Watch, what: &str, work: impl FnOnce() -> T) -> T {
    if !std::io::stderr().is_terminal() {
        return work();
    }
    thread::scope(|scope| {
        let (working, ended) = channel();
        scope.spawn(move || draw(watch, what, &ended, (SOON, ProgressDrawTarget::stderr)));
        let result = work();
        drop(working);
        result
    })
}

/// Draws until the other end is gone.
fn draw(
    watch: &Watch,
    what: &str,
    ended: &Receiver<()>,
    (soon, target): (Duration, impl FnOnce() -> ProgressDrawTarget),
) {
    if ended.recv_timeout(soon) != Err(RecvTimeoutError::Timeout) {
        return;
    }
    let style = format!("{{bar:40}} {{pos}} of {{len}} {what}, {{elapsed}}, {{eta}} left");
    let style = ProgressStyle::with_template(&style);
    let bar = ProgressBar::with_draw_target(Some(0), target())
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    loop {
        let (done, all) = watch.far();
        bar.set_length(all);
        bar.set_position(done);
        // also where nothing is done yet
        bar.tick();
        if ended.recv_timeout(AGAIN) != Err(RecvTimeoutError::Timeout) {
            return bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::Arc;
    use std::time::Instant;

    /// As many columns as it likes; it counts what is written.
    #[derive(Clone, Debug, Default)]
    struct Counted(Arc<AtomicUsize>);

    impl indicatif::TermLike for Counted {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> std::io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> std::io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> std::io::Result<()> {
            self.0.fetch_add(text.len(), Ordering::Relaxed);
            Ok(())
        }
        fn clear_line(&self) -> std::io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// What is written until `enough` says so of the number of bytes.
    fn written(soon: Duration, enough: impl Fn(usize) -> bool) -> usize {
        let (watch, seen) = (Watch::default(), Counted::default());
        let target = || ProgressDrawTarget::term_like(Box::new(seen.clone()));
        let begun = Instant::now();
        thread::scope(|scope| {
            let (working, ended) = channel();
            let watch = &watch;
            scope.spawn(move || draw(watch, "parts", &ended, (soon, target)));
            while !enough(seen.0.load(Ordering::Relaxed)) {
                assert!(begun.elapsed() < Duration::from_secs(60), "it does not come");
                thread::yield_now();
            }
            drop(working);
        });
        seen.0.load(Ordering::Relaxed)
    }

    /// A first part that takes long is seen, too.
    #[test]
    fn a_bar_comes_though_nothing_is_done() {
        assert!(written(Duration::from_millis(1), |bytes| bytes > 0) > 0);
    }

    #[test]
    fn what_ends_soon_has_none() {
        // it does not wait for the hour
        assert_eq!(written(Duration::from_secs(3600), |_| true), 0);
    }
}
