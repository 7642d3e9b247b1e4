//! Figure 10: the progress of a training with PyTorch and checkpoints, through the failure of a
//! NIC.
//!
//! The paper trains a model of 13 billion parameters on sixteen GPUs by FSDP over NCCL. Here two
//! ranks on CPUs train a small one by FSDP (tests/torch/checkpointed.py, PyTorch from PyPI) over
//! protected queue pairs. As in the paper it has four epochs, writes a checkpoint after each, the
//! default NIC fails after 1.78 of them, and others send over a busy backup.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use unbroken_chart::{Axis, Figure, Line, Lines, Look, Marker, Panel, Unit};
use unbroken_fabric::{Schedule, Shape};
use unbroken_testkit::{free_port, Lab, Pair, Running, Spec};

use super::{Drawing, Row, Tools, NO_TORCH};
use crate::Result;

/// Of an epoch, and of all four.
const EPOCH_STEPS: usize = 50;
const STEPS: usize = 4 * EPOCH_STEPS;
/// The NIC fails after so many: 1.78 epochs.
const FAULT_STEP: usize = 89;
/// The paper's flap.
const FLAP: Duration = Duration::from_secs(2);
/// Sends fail so often while the NIC is bad.
const ERROR_EVERY: Duration = Duration::from_millis(100);
/// No training takes longer, and none that has failed takes longer to say so.
const LIMIT: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// What others send over the backup when it is busy, and how fast it is then. They sleep until
/// there are completions: a program that polls would keep the ranks from their cores.
const OTHERS: (&str, &str) = ("ib_send_bw", "-d unb1 -F -e -s 65536 -n 50000000");
const BUSY_RATES: [&str; 2] = ["rate a/1 2Gbit", "rate b/1 2Gbit"];
/// The hosts of the two ranks.
const HOSTS: [&str; 2] = ["a", "b"];

/// A training: when which step was done, and how it ended.
#[derive(Default)]
struct Training {
    /// Time in s since the first step of all; steps done.
    progress: Vec<(f64, f64)>,
    /// It has ended well, after so many steps.
    ended_at: Option<usize>,
    fault_s: Option<f64>,
}

/// How a NIC fails, and for how long.
enum Fault {
    /// As in the paper: sends on it fail again and again.
    Sends(Option<Duration>),
    /// It dies.
    Dead,
}

/// A fabric, and a folder of checkpoints in it.
struct Trial<'a> {
    lab: Lab,
    tools: &'a Tools,
    /// What makes the backup busy, if it is.
    _busy: Option<Pair>,
    began: Option<Instant>,
}

impl<'a> Trial<'a> {
    /// With so many NICs a host; `busy`: others use the second one.
    fn new(tools: &'a Tools, nics: u8, busy: bool) -> Result<Trial<'a>> {
        let lab = Lab::with_shape(&tools.unbroken, &Shape::of(0, &HOSTS, nics))?;
        let busy = match busy {
            true => {
                for rate in BUSY_RATES {
                    lab.fabric().schedule(&rate.parse()?, &Schedule::default())?;
                }
                Some(Pair::start(&lab, &Spec::new(OTHERS.0, OTHERS.1))?)
            }
            false => None,
        };
        std::fs::create_dir(lab.folder().join("checkpoints"))?;
        Ok(Trial { lab, tools, _busy: busy, began: None })
    }

    /// Starts the ranks where the last checkpoint is.
    fn start(&self, failover: bool, options: &[&str]) -> Result<Running> {
        let Some((python, script)) = &self.tools.training else { return Err(NO_TORCH.into()) };
        let port = free_port()?.to_string();
        let mut command = Command::new(python);
        command.args(["-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2"]);
        command.args(["--master-port", &port]).arg(script);
        command.args([STEPS.to_string(), EPOCH_STEPS.to_string()]);
        command.arg(self.lab.folder().join("checkpoints")).args(options);
        command
            .env("PYTHONPATH", absolute("python/unbroken")?)
            .env("UNBROKEN_COLLECTIVE_LIBRARY", library(&self.tools.unbroken)?)
            .env("UNBROKEN_RUNTIME", self.lab.runtime().path())
            .env("UNBROKEN_HOSTS", HOSTS.join(","))
            .env("UNBROKEN_COLL_LOGICAL", "1")
            .env("UNBROKEN_FAILOVER", if failover { "1" } else { "0" })
            .env("OMP_NUM_THREADS", "1");
        let log = self.lab.folder().join(format!("torchrun-{port}.log"));
        Ok(Running::start(command, "torchrun", log)?)
    }

    fn set(&self, fault: &Fault) -> Result<()> {
        let (words, every) = match fault {
            Fault::Sends(_) => ("wqe-error a/0", Some(ERROR_EVERY)),
            Fault::Dead => ("nic a/0 dead", None),
        };
        let when = Schedule { every, ..Schedule::default() };
        self.lab.fabric().schedule(&words.parse()?, &when)?;
        Ok(())
    }

    /// NIC a/0 is well.
    fn heal(&self) -> Result<()> {
        for fault in ["wqe-error a/0", "nic a/0 dead"] {
            self.lab.fabric().clear(Some(&fault.parse()?))?;
        }
        Ok(())
    }

    /// Trains from the last checkpoint until it ends.
    fn train(
        &mut self,
        failover: bool,
        options: &[&str],
        fault: Option<&Fault>,
    ) -> Result<Training> {
        let mut ranks = self.start(failover, options)?;
        let (mut training, until) = (Training::default(), Instant::now() + LIMIT);
        let mut heals = None;
        loop {
            let ended = ranks.ended();
            let output = ranks.output();
            let done = output.lines().rfind(|line| line.starts_with("loss "));
            let done = done.and_then(|line| line.split(' ').nth(1)?.parse::<usize>().ok());
            if let Some(done) = done.map(|step| step + 1) {
                let now_s = self.began.get_or_insert_with(Instant::now).elapsed().as_secs_f64();
                if training.progress.last().is_none_or(|(_, before)| done as f64 > *before) {
                    training.progress.push((now_s, done as f64));
                }
                if let (Some(fault), true) =
                    (fault, done >= FAULT_STEP && training.fault_s.is_none())
                {
                    self.set(fault)?;
                    training.fault_s = Some(now_s);
                    if let Fault::Sends(Some(lasts)) = fault {
                        heals = Some(Instant::now() + *lasts);
                    }
                }
                training.ended_at = ended.filter(ExitStatus::success).map(|_| done);
            }
            if heals.is_some_and(|at| Instant::now() >= at) {
                self.heal()?;
                heals = None;
            }
            if ended.is_some() || Instant::now() > until {
                break;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        match training.progress.is_empty() {
            true => Err(ranks.failed("made no step".into()).into()),
            false => Ok(training),
        }
    }

    /// Trains through the fault, and, where that ends before all steps are done, once more without
    /// it.
    fn and_again(
        &mut self,
        failover: bool,
        options: &[&str],
        fault: &Fault,
    ) -> Result<(Training, Training)> {
        let first = self.train(failover, options, Some(fault))?;
        self.heal()?;
        let second = self.train(failover, &[], None)?;
        Ok((first, second))
    }
}

fn absolute(path: &str) -> Result<PathBuf> {
    Ok(std::path::absolute(path)?)
}

/// The collectives' library beside the command.
fn library(unbroken: &Path) -> Result<PathBuf> {
    Ok(std::path::absolute(unbroken.with_file_name("libunbroken_coll.so"))?)
}

impl Training {
    fn end_s(&self) -> f64 {
        self.progress.last().map_or(f64::NAN, |(time_s, _)| *time_s)
    }

    fn told(&self) -> String {
        let steps = self.progress.last().map_or(0.0, |(_, steps)| *steps);
        match self.ended_at {
            Some(STEPS) => format!("{STEPS} steps after {:.1} s", self.end_s()),
            Some(steps) => format!("saves itself and ends at step {steps}"),
            None => format!("ends with an error at step {steps:.0}"),
        }
    }

    /// The step from which it went on.
    fn from(&self) -> usize {
        self.progress.first().map_or(0, |(_, done)| *done as usize - 1)
    }

    fn line(&self, name: &str, colour: usize) -> Line {
        Line::new(name, colour, self.progress.clone())
    }
}

/// What was measured.
struct Measured {
    healthy: Training,
    /// The same while others use the second NIC: all of it shares the cores.
    beside: Training,
    /// Without failover, and again from the last checkpoint.
    restarted: (Training, Training),
    /// With failover, a busy backup, a checkpoint at the switch; and again from that.
    saved: (Training, Training),
    idle: Training,
    flap: Training,
}

impl Measured {
    /// Each trial ends before the next begins.
    fn by(tools: &Tools) -> Result<Measured> {
        let once = |busy: bool, fault: Option<&Fault>| {
            let mut trial = Trial::new(tools, 2, busy)?;
            trial.train(true, &[], fault)
        };
        let twice = |failover: bool, options: &[&str], fault: &Fault| {
            let (nics, busy) = if failover { (2, true) } else { (1, false) };
            let mut trial = Trial::new(tools, nics, busy)?;
            trial.and_again(failover, options, fault)
        };
        let (forever, flap) = (Fault::Sends(None), Fault::Sends(Some(FLAP)));
        Ok(Measured {
            healthy: once(false, None)?,
            beside: once(true, None)?,
            restarted: twice(false, &[], &Fault::Dead)?,
            saved: twice(true, &["--at-switch", "--leave"], &forever)?,
            idle: once(false, Some(&forever))?,
            flap: once(true, Some(&flap))?,
        })
    }

    fn rows(&self) -> Vec<Row> {
        let row = |what: &str, published: &str, here: String| {
            Row::new("Figure 10", what, published, here)
        };
        let twice = |(first, second): &(Training, Training)| {
            format!("{}; again from step {}: {}", first.told(), second.from(), second.told())
        };
        vec![
            row("no failure", "the upper bound", self.healthy.told()),
            row("no failure, the backup busy", "no figure in the text", self.beside.told()),
            row(
                "a NIC fails, without failover, started again",
                "progress since the checkpoint is lost",
                twice(&self.restarted),
            ),
            row(
                "with failover, the backup busy: a checkpoint, and started again",
                "no progress is lost",
                twice(&self.saved),
            ),
            row("with failover, the backup idle", "no degradation", self.idle.told()),
            row(
                "with failover, the backup busy, the NIC is back after 2 s",
                "nearly unaffected",
                self.flap.told(),
            ),
        ]
    }

    fn panel(&self, title: &str, of: &[&Training]) -> Panel {
        let Measured { healthy, beside, restarted, saved, idle, flap } = self;
        let ends = [healthy, beside, &restarted.1, &saved.1, idle, flap].map(Training::end_s);
        let span_s = ends.into_iter().fold(1.0, f64::max);
        let checkpoint = |epoch: usize| {
            let steps = (epoch * EPOCH_STEPS) as f64;
            let name = if epoch == 1 { "checkpoints that are due" } else { "" };
            Line::new(name, 4, vec![(0.0, steps), (span_s, steps)]).looking(Look::Dashed)
        };
        let mut lines = vec![
            healthy.line("no failure", 5).looking(Look::Dotted),
            beside.line("no failure, the backup busy", 1).looking(Look::Dotted),
            restarted.0.line("without failover: ends, and begins again", 0),
            restarted.1.line("", 0),
        ];
        let names = std::iter::once("with failover").chain(std::iter::repeat(""));
        lines.extend(of.iter().zip(names).map(|(training, name)| training.line(name, 2)));
        lines.extend((1..4).map(checkpoint));
        Panel::Lines(Lines {
            title: title.into(),
            x: Axis::linear("time", 0.0, span_s, Unit::S),
            y: Axis::linear("steps", 0.0, STEPS as f64 * 1.05, Unit::Plain),
            lines,
            markers: of
                .iter()
                .filter_map(|training| training.fault_s)
                .map(|x| Marker { x, words: "fault".into() })
                .collect(),
        })
    }
}

/// Progress over time: undisturbed, with failover, and started again without it.
pub fn figure_10(tools: &Tools) -> Result<Drawing> {
    let measured = Measured::by(tools)?;
    let Measured { saved, idle, flap, .. } = &measured;
    let figure = Figure {
        title:
            "SHIFT, Figure 10: progress of PyTorch (FSDP) through the failure of a NIC. A small \
             model on CPUs over softnic"
                .into(),
        panels: vec![
            measured.panel("(a) busy backup, saved and started again", &[&saved.0, &saved.1]),
            measured.panel("(b) idle backup", &[idle]),
            measured.panel("(c) busy backup, the NIC is back after 2 s", &[flap]),
        ],
        columns: 3,
        notes: vec![format!(
            "Two ranks, four epochs of {EPOCH_STEPS} steps. The NIC fails after {FAULT_STEP} \
             steps: sends on it end with an error each 100 ms. Without failover each host has one \
             NIC, which dies; an operation that stands still is given up after 10 s. The busy \
             backup carries 2 Gbit/s, all of it taken by ib_send_bw, which shares the cores with \
             the ranks: it slows them down without any failure, too."
        )],
    };
    Ok(Drawing { figure, rows: measured.rows() })
}
