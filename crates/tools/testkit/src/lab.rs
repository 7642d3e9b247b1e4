//! A fabric for one trial.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use unbroken_fabric::{DeviceKind, Fabric, NicKind, Runtime, Shape};
use unbroken_runtime::DEFAULT_VARIABLE;

use crate::error::{Result, TrialError};
use crate::running::Running;

/// A runtime folder of its own with the default fabric (hosts a to d). Removed when dropped.
pub struct Lab {
    dir: tempfile::TempDir,
    runtime: Runtime,
    fabric: Fabric,
    unbroken: PathBuf,
    started: AtomicU32,
}

impl Lab {
    /// Makes a lab that starts programs by the command `unbroken`.
    pub fn new(unbroken: &Path) -> Result<Lab> {
        Lab::with_device(unbroken, DeviceKind::Full)
    }

    /// Makes a lab that starts programs by the command `unbroken`, with NICs of a kind.
    pub fn with_device(unbroken: &Path, device: DeviceKind) -> Result<Lab> {
        Lab::with_shape(
            unbroken,
            &Shape { kind: NicKind { device, ..NicKind::default() }, ..Shape::standard(0) },
        )
    }

    /// Makes a lab that starts programs by the command `unbroken`, with hosts and NICs of another
    /// shape.
    pub fn with_shape(unbroken: &Path, shape: &Shape) -> Result<Lab> {
        let dir = tempfile::Builder::new()
            .prefix("unbroken-trial-")
            .tempdir_in(Runtime::temporary_root());
        let dir = dir.map_err(TrialError::io("make a temporary folder"))?;
        let runtime = Runtime::at(&dir.path().join("runtime"))?;
        let fabric = Fabric::create(&runtime, shape)?;
        Ok(Lab { dir, runtime, fabric, unbroken: unbroken.into(), started: AtomicU32::new(0) })
    }

    /// The runtime folder.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// The fabric.
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// A folder for the files of this trial.
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// The command that runs `program` on `host`.
    pub fn command(&self, host: &str, failover: bool, program: &str, args: &[String]) -> Command {
        let mut command = Command::new(&self.unbroken);
        command.env(DEFAULT_VARIABLE, self.runtime.path()).args(["run", "--host", host]);
        if !failover {
            command.arg("--no-failover");
        }
        command.arg("--").arg(program).args(args);
        command
    }

    /// Starts `program` on `host`.
    pub fn start(
        &self,
        host: &str,
        failover: bool,
        program: &str,
        args: &[String],
    ) -> Result<Running> {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let name = Path::new(program)
            .file_name()
            .map_or(program.into(), |n| n.to_string_lossy().into_owned());
        let log = self.dir.path().join(format!("{number}-{host}-{name}.log"));
        Running::start(
            self.command(host, failover, program, args),
            &format!("{name} on host {host}"),
            log,
        )
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Gives the octet and the shared pages back; what cannot be removed lies in a temporary
        // folder.
        let _ = Fabric::remove(&self.runtime);
    }
}
