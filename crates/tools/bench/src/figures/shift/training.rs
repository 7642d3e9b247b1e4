//! Figure 10: the progress of a training with PyTorch, through the failure of a NIC.
//!
//! The paper trains a model of 13 billion parameters on sixteen GPUs over NCCL. Here two ranks on
//! CPUs train a small GPT, split by PyTorch's RPC over TensorPipe's verbs (tests/torch/gpt.py,
//! PyTorch from PyPI). It writes no checkpoints, so what ends begins again at step 0.

use std::path::Path;
use std::time::{Duration, Instant};

use unbroken_chart::{Axis, Figure, Line, Lines, Look, Marker, Panel, Unit};
use unbroken_fabric::Schedule;
use unbroken_testkit::{free_port, Lab, Running};

use super::{Drawing, Row, Tools, NO_TORCH};
use crate::Result;

const STEPS: usize = 150;
/// The NIC fails after so many.
const FAULT_STEP: usize = 60;
/// The paper's flap.
const FLAP: Duration = Duration::from_secs(2);
/// No training takes longer, and none that has failed takes longer to say so.
const LIMIT: Duration = Duration::from_secs(90);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A training: when which step was done, and how it ended.
struct Training {
    /// Time in s since the first step of all; steps done.
    progress: Vec<(f64, f64)>,
    finished: bool,
    fault_s: Option<f64>,
}

fn rank(
    lab: &Lab,
    (python, script): (&Path, &Path),
    failover: bool,
    rank: u8,
    port: u16,
) -> Result<Running> {
    let args = [
        "-W",
        "ignore",
        &script.display().to_string(),
        "--rank",
        &rank.to_string(),
        "--port",
        &port.to_string(),
    ]
    .into_iter()
    .chain(["--transport", "ibv", "--steps", &STEPS.to_string()])
    .map(String::from)
    .collect::<Vec<_>>();
    Ok(lab.start(
        if rank == 0 { "a" } else { "b" },
        failover,
        &python.display().to_string(),
        &args,
    )?)
}

/// Trains once; `began` is where time is counted from, if some training was before.
fn train(
    lab: &Lab,
    program: (&Path, &Path),
    failover: bool,
    fault: Option<&Schedule>,
    began: &mut Option<Instant>,
) -> Result<Training> {
    let port = free_port()?;
    let mut second = rank(lab, program, failover, 1, port)?;
    let mut first = rank(lab, program, failover, 0, port)?;
    let (mut training, until) =
        (Training { progress: Vec::new(), finished: false, fault_s: None }, Instant::now() + LIMIT);
    loop {
        let ended = first.ended();
        let done = first.output().lines().filter(|line| line.starts_with("loss ")).count();
        if done > 0 && training.progress.last().is_none_or(|(_, before)| done as f64 > *before) {
            let now_s = began.get_or_insert_with(Instant::now).elapsed().as_secs_f64();
            training.progress.push((now_s, done as f64));
            if let (Some(when), true) = (fault, done >= FAULT_STEP && training.fault_s.is_none()) {
                lab.fabric().schedule(&"nic a/0 dead".parse()?, when)?;
                training.fault_s = Some(now_s);
            }
        }
        if let Some(status) = ended {
            training.finished = status.success() && done == STEPS;
            break;
        }
        if Instant::now() > until {
            break;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    if training.finished {
        second.succeed(LIMIT)?;
    }
    if training.progress.is_empty() {
        return Err(first.failed("made no step".into()).into());
    }
    Ok(training)
}

/// What ends begins again, without a fault.
fn with_restart(tools: &Tools, program: (&Path, &Path)) -> Result<(Training, Training)> {
    let (lab, mut began) = (Lab::new(&tools.unbroken)?, None);
    let until_cleared = Schedule::default();
    let first = train(&lab, program, false, Some(&until_cleared), &mut began)?;
    lab.fabric().clear(None)?;
    let second = train(&lab, program, false, None, &mut began)?;
    Ok((first, second))
}

/// Progress over time: undisturbed, with failover, and started again without it.
pub fn figure_10(tools: &Tools) -> Result<Drawing> {
    let Some((python, script)) = &tools.training else {
        return Err(NO_TORCH.into());
    };
    let program = (python.as_path(), script.as_path());
    let once = |fault: Option<Schedule>| {
        train(&Lab::new(&tools.unbroken)?, program, true, fault.as_ref(), &mut None)
    };
    let healthy = once(None)?;
    let (ended, again) = with_restart(tools, program)?;
    let dead = once(Some(Schedule::default()))?;
    let flap = once(Some(Schedule { lasts: Some(FLAP), ..Schedule::default() }))?;
    let last = |t: &Training| t.progress.last().map_or(f64::NAN, |(time_s, _)| *time_s);
    let told = |t: &Training| match t.finished {
        true => format!("{STEPS} steps after {:.1} s", last(t)),
        false => format!("ended at step {:.0}", t.progress.last().map_or(0.0, |(_, step)| *step)),
    };
    let row =
        |what: &str, published: &str, here: String| Row::new("Figure 10", what, published, here);
    let rows = vec![
        row("no failure", "the upper bound", told(&healthy)),
        row(
            "a NIC fails, without failover, started again",
            "progress since the checkpoint is lost",
            format!("{}; again: {}", told(&ended), told(&again)),
        ),
        row("the same with failover, the backup idle", "no degradation", told(&dead)),
        row("the NIC is back after 2 s", "nearly unaffected", told(&flap)),
    ];
    let span_s = [&healthy, &again, &dead, &flap].map(last).into_iter().fold(1.0, f64::max);
    let line = |name: &str, colour, t: &Training| Line::new(name, colour, t.progress.clone());
    let panel = |title: &str, name: &str, colour, of: &Training| {
        Panel::Lines(Lines {
            title: title.into(),
            x: Axis::linear("time", 0.0, span_s, Unit::S),
            y: Axis::linear("steps", 0.0, STEPS as f64 * 1.05, Unit::Plain),
            lines: vec![
                line("no failure", 5, &healthy).looking(Look::Dotted),
                line("without failover: ends, and begins again", 0, &ended),
                line("", 0, &again),
                line(name, colour, of),
            ],
            markers: of
                .fault_s
                .map(|x| Marker { x, words: "nic a/0 dead".into() })
                .into_iter()
                .collect(),
        })
    };
    let figure = Figure {
        title: "SHIFT, Figure 10: progress of PyTorch through the failure of a NIC. A small GPT on CPUs over softnic".into(),
        panels: vec![
            panel("(b) the NIC stays dead", "with failover", 2, &dead),
            panel("(c) the NIC is back after 2 s", "with failover, the NIC comes back", 3, &flap),
        ],
        columns: 2,
        notes: vec![
            "The paper's training has GPUs, NCCL and checkpoints; this one has none, and is started again at step 0. Its part (a), a backup that is busy, is left out: here all NICs share the cores.".into(),
        ],
    };
    Ok(Drawing { figure, rows })
}
