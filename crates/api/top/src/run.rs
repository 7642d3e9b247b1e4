//! The terminal: keys in, pictures out.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{sync_channel, Receiver, RecvTimeoutError, Sender, SyncSender, TryRecvError};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossterm::event::{poll, read, Event, KeyEventKind};
use ratatui::DefaultTerminal;
use rustix::event::{poll as poll_fds, PollFd, PollFlags, Timespec};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use unbroken_fabric::Runtime;
use unbroken_observe::{Action, Observer, Snapshot};

use crate::history::History;
use crate::render::render;
use crate::view::{Next, View};

/// How the screen is to be.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How often to look.
    pub interval: Duration,
    /// Whether colours are to be left out.
    pub is_plain: bool,
}

/// Keys are waited for so long, then it is looked whether there is a newer picture.
const KEY_WAIT: Duration = Duration::from_millis(200);

/// How often it is looked whether the terminal is still there, and how long the screen has to
/// follow a signal.
const LOOK: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(1);

/// Signals that end the screen. The terminal is as before first, then they do what they do.
const ENDS: [i32; 4] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT];

type Seen = Result<Arc<Snapshot>, String>;

/// Shows a runtime folder on this terminal until a key ends it. The terminal is as before
/// afterwards, also after a panic. Errors: this is no terminal, or the folder cannot be read.
pub fn run(runtime: &Runtime, options: Options) -> io::Result<()> {
    let (to_screen, seen) = sync_channel(1);
    let (wake, woken) = std::sync::mpsc::channel();
    let observer = Observer::new(runtime);
    // Ends by itself once the screen does: nobody takes what it sends.
    std::thread::Builder::new()
        .name("observer".into())
        .spawn(move || watch(observer, options.interval, &to_screen, &woken))?;
    let ended_by = Arc::new(AtomicUsize::new(0));
    for signal in ENDS {
        signal_hook::flag::register_usize(signal, ended_by.clone(), signal as usize)?;
    }
    let signal = ended_by.clone();
    std::thread::Builder::new().name("terminal".into()).spawn(move || end_with(&signal))?;
    let mut terminal = ratatui::try_init()?;
    let shown = show(&mut terminal, runtime, options, &seen, (&wake, &ended_by));
    ratatui::try_restore()?;
    match ended_by.load(Ordering::Relaxed) {
        0 => shown,
        signal => signal_hook::low_level::emulate_default_handler(signal as i32),
    }
}

/// Ends the process when its terminal is gone, or by a signal that the screen has not followed:
/// crossterm goes on reading a terminal that is closed, and does not come back.
fn end_with(signal: &AtomicUsize) {
    let input = io::stdin();
    let every = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
    let mut signalled_at = None;
    loop {
        // Nothing but that it is gone is asked for.
        let mut looked_at = [PollFd::new(&input, PollFlags::empty())];
        let is_gone = poll_fds(&mut looked_at, Some(&every)).is_ok_and(|ready| ready > 0);
        let signal = signal.load(Ordering::Relaxed);
        if signal != 0 {
            let since = *signalled_at.get_or_insert_with(Instant::now);
            if since.elapsed() < PATIENCE && !is_gone {
                continue;
            }
        } else if !is_gone {
            continue;
        }
        let _ = ratatui::try_restore();
        let signal = if signal == 0 { SIGHUP } else { signal as i32 };
        let _ = signal_hook::low_level::emulate_default_handler(signal);
        return;
    }
}

/// Looks again and again, at once when woken.
fn watch(mut observer: Observer, every: Duration, screen: &SyncSender<Seen>, woken: &Receiver<()>) {
    loop {
        let seen = observer.look().map(Arc::new).map_err(|e| e.to_string());
        if screen.send(seen).is_err() {
            return;
        }
        if let Err(RecvTimeoutError::Disconnected) = woken.recv_timeout(every) {
            return;
        }
    }
}

fn show(
    terminal: &mut DefaultTerminal,
    runtime: &Runtime,
    options: Options,
    seen: &Receiver<Seen>,
    (wake, ended_by): (&Sender<()>, &AtomicUsize),
) -> io::Result<()> {
    let (mut history, mut is_new) = (History::default(), true);
    let mut view = View { is_plain: options.is_plain, ..View::default() };
    let wait = KEY_WAIT.min(options.interval);
    while ended_by.load(Ordering::Relaxed) == 0 {
        match seen.try_recv() {
            Ok(Ok(snapshot)) => {
                history.push(snapshot);
                is_new = true;
            }
            Ok(Err(why)) => return Err(io::Error::other(why)),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return Err(io::Error::other("the observer ended")),
        }
        if std::mem::take(&mut is_new) {
            terminal.draw(|frame| render(&history, &view, frame.area(), frame.buffer_mut()))?;
        }
        let deadline = Instant::now() + wait;
        while poll(deadline.saturating_duration_since(Instant::now()))? {
            is_new = true;
            let Event::Key(key) = read()? else { continue };
            // Some terminals tell of keys that are let go, too.
            if key.kind == KeyEventKind::Release {
                continue;
            }
            let empty = Snapshot::default();
            match view.key(key, history.last().unwrap_or(&empty)) {
                Next::Draw => {}
                Next::Quit => return Ok(()),
                Next::Act(action) => {
                    view.message = act(&action, runtime);
                    let _ = wake.send(());
                }
            }
            // What was typed ahead is taken before anything is drawn, but not for ever.
            if Instant::now() >= deadline || !poll(Duration::ZERO)? {
                break;
            }
        }
    }
    Ok(())
}

fn act(action: &Action, runtime: &Runtime) -> String {
    action.carry_out(runtime).unwrap_or_else(|e| format!("failed: {e}"))
}
