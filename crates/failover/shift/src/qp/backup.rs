//! What the thread for backups does with a QP (see [`crate::backups`]).

use super::{Gate, Qp};
use crate::backups::Backup;
use crate::core::Core;
use crate::link;
use std::sync::Arc;
use unbroken_runtime::now_us;
use unbroken_types::{QpState, QpType};
use unbroken_verbs::{Device, QpInit, QpModify, RcModify, Result};

/// Starts the thread, where it has something to do.
pub(crate) fn begin(core: &Arc<Core<Qp>>) {
    let slow = |i| core.nics.capabilities(i).slow_control;
    if core.settings.backups == 0 || !(0..core.nics.count()).any(slow) {
        return;
    }
    let own = core.clone();
    match unbroken_process::spawn("unb-backups", move || run(&own)) {
        Ok(_) => core.backups.started(),
        Err(e) => core.events.complain("no thread for backup queue pairs", &e),
    }
}

fn run(core: &Arc<Core<Qp>>) {
    let mut parallel = false;
    while let Some(id) = core.backups.next() {
        // There are QPs that may switch. (Here, and not on the path of the program's verbs.)
        if !std::mem::replace(&mut parallel, true) {
            if let Err(e) = core.parallel.begin() {
                core.events.complain("no threads for many switches at once", &e);
            }
        }
        // A defect in one must not leave the others without.
        let round = std::panic::AssertUnwindSafe(|| {
            core.qps.get(id).into_iter().for_each(|qp| qp.tend_backup());
        });
        if std::panic::catch_unwind(round).is_err() {
            core.events.complain("backup queue pairs", &"a round of work ended in a panic");
        }
        core.backups.finished();
    }
}

impl Qp {
    /// Ends a backup that the QP has no use for any more, and makes one.
    fn tend_backup(&self) {
        let (old, wanted) = {
            let mut g = self.gate();
            let wanted = self.wants_backup(&g);
            let here = g.nic;
            let useless = |backup: &mut Backup| match &wanted {
                Some((nic, device)) => !backup.is_of(*nic, device),
                // It may be connected again and have use for it.
                None => backup.nic == here || !backup.device.alive(),
            };
            let old = g.backup.take_if(useless);
            (old, wanted.filter(|_| g.backup.is_none()))
        };
        old.into_iter().for_each(|backup| backup.phys.retire());
        let Some((nic, device)) = wanted else { return };
        let start_us = now_us();
        let made = self.make_backup(nic, &device);
        let news = self.core.backups.count(made.is_ok(), now_us() - start_us);
        match made {
            Ok(backup) => self.keep_backup(backup),
            // Its limits do not say what it lacks (inline data, for one), and asked again it says
            // the same.
            Err(e) if e.errno() == libc::EINVAL && device.alive() => {
                self.core.tell_unfit(nic, &e.to_string());
                self.unfit.add(nic);
                link::beliefs_changed(self, &mut self.gate());
                self.core.backups.look_at(self.id());
            }
            Err(e) if news && device.alive() => {
                self.core.events.complain("a backup QP cannot be made ahead", &e);
            }
            Err(_) => {}
        }
    }

    /// Where the QP is to have a backup now.
    fn wants_backup(&self, g: &Gate) -> Option<(usize, Arc<dyn Device>)> {
        if self.init.qp_type != QpType::Rc || self.init.srq.is_some() || g.is_over() {
            return None;
        }
        let nic = usize::from(g.link.as_ref()?.executor().lqp().next_path()?.local);
        let device = self.core.nics.device(nic)?;
        (nic != g.nic && device.capabilities().slow_control).then_some((nic, device))
    }

    fn make_backup(&self, nic: usize, device: &Arc<dyn Device>) -> Result<Backup> {
        let init = QpInit { standby: true, ..self.init.clone() };
        let phys = self.core.make_life(device, nic, &init)?;
        let access = self.gate().app.rc.access;
        let rc = RcModify { state: Some(QpState::Init), access, ..RcModify::default() };
        if let Err(e) = phys.modify(&QpModify { rc, ..QpModify::default() }) {
            phys.destroy();
            return Err(e);
        }
        Ok(Backup { nic, device: device.clone(), access, phys })
    }

    /// The QP has its backup, unless it has become useless meanwhile.
    fn keep_backup(&self, backup: Backup) {
        let mut g = self.gate();
        let wanted = self.wants_backup(&g);
        if g.backup.is_none() && wanted.is_some_and(|(nic, device)| backup.is_of(nic, &device)) {
            g.backup = Some(backup);
            return;
        }
        drop(g);
        backup.phys.destroy();
        // It may want another.
        self.core.backups.look_at(self.id());
    }
}
