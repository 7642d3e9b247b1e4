//! Physical QPs of devices that have plain verbs only: nothing above can stop one and take its work
//! along, so nothing protects it.

use std::sync::Arc;
use unbroken_types::{Progress, QpState, WcStatus};
use unbroken_verbs::{
    Backlog, DeviceQp, Error, ListResult, QpModify, QpSnapshot, RcModify, RecvWr, Result,
    ResumableQp, SendBatch, SendWr,
};

/// Why a QP on such a device is not protected.
pub(crate) const NO_JOURNAL: &str = "the device cannot hold its work, and there is no journal";

/// Such a QP in the place of one that holds. It was not made to hold, so nobody asks it to.
pub(crate) struct Plain(pub(crate) Arc<dyn DeviceQp>);

impl DeviceQp for Plain {
    fn qpn(&self) -> u32 {
        self.0.qpn()
    }

    fn post_send(&self, wr: &SendWr<'_>) -> Result<()> {
        self.0.post_send(wr)
    }

    fn post_sends(&self, batch: &dyn SendBatch) -> Result<()> {
        self.0.post_sends(batch)
    }

    fn post_list(&self, list: &[SendWr<'_>]) -> ListResult {
        self.0.post_list(list)
    }

    fn post_recv(&self, wr: &RecvWr<'_>) -> Result<()> {
        self.0.post_recv(wr)
    }

    fn modify(&self, change: &QpModify) -> Result<()> {
        self.0.modify(change)
    }

    fn query(&self) -> QpSnapshot {
        self.0.query()
    }

    fn state(&self) -> QpState {
        self.0.state()
    }

    fn destroy(&self) {
        self.0.destroy()
    }
}

impl ResumableQp for Plain {
    /// Nothing else is known of it.
    fn progress(&self) -> Progress {
        Progress { state: self.state(), ..Progress::default() }
    }

    fn quiesce(&self) -> Result<Backlog> {
        Err(Error::unsupported(NO_JOURNAL))
    }

    fn adopt(&self, _: Backlog) -> Result<()> {
        Err(Error::unsupported(NO_JOURNAL))
    }

    fn fail(&self, _: WcStatus) {
        let rc = RcModify { state: Some(QpState::Err), ..RcModify::default() };
        // One that cannot go there is there already.
        let _ = self.0.modify(&QpModify { rc, ..QpModify::default() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Context, QpRequest, System};
    use crate::core::Core;
    use crate::soft;
    use unbroken_runtime::Runtime;
    use unbroken_softnic::{Config, DeviceKind, NicSource};
    use unbroken_types::{Access, PdHandle, QpCaps, QpType};
    use unbroken_verbs::{Cq, SrqAttr};

    fn request(pd: PdHandle, cq: &Arc<Cq>) -> QpRequest {
        let caps = QpCaps {
            max_send_wr: 8,
            max_recv_wr: 8,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let cq = || cq.clone();
        let (send_cq, recv_cq) = (cq(), cq());
        QpRequest {
            qp_type: QpType::Rc,
            caps,
            pd,
            send_cq,
            recv_cq,
            srq: None,
            sq_sig_all: true,
            plain: false,
            management: false,
            cookie: 1,
        }
    }

    #[test]
    fn what_a_context_of_a_bare_device_makes_is_its_own_and_not_protected() {
        let folder = tempfile::tempdir().unwrap();
        let addresses = ["127.79.1.1", "127.79.1.2"].map(|a| a.parse().unwrap()).to_vec();
        let plain = NicSource::Addresses(addresses, DeviceKind::Plain);
        let runtime = Runtime::at(folder.path()).unwrap();
        let nics = soft::with(Config::of(runtime, plain), false).unwrap();
        let core = Core::over(nics).unwrap();
        assert!(core.settings.failover, "the environment does not switch it off");
        // A system lasts as long as its process.
        let system: &'static System = Box::leak(Box::new(System::with(core.clone())));
        let contexts: [Arc<Context>; 2] = [0, 1].map(|nic| system.open(nic).unwrap());
        let bytes = [0u64; 8];
        let addr = bytes.as_ptr() as u64;
        let made = contexts.each_ref().map(|c| {
            let pd = c.alloc_pd().unwrap();
            let channel = c.create_channel().unwrap();
            (
                pd,
                c.create_cq(8, Some(channel)).unwrap(),
                c.reg_mr(pd, addr, 64, addr, Access::LOCAL_WRITE).unwrap(),
            )
        });
        let [(pd, cq, keys), (other_pd, other_cq, _)] = &made;
        let einval = |result: Result<()>| assert_eq!(result.unwrap_err().errno(), libc::EINVAL);
        einval(contexts[0].reg_mr(*other_pd, addr, 64, addr, Access::LOCAL_WRITE).map(drop));
        einval(contexts[1].dereg_mr(keys.lkey));
        einval(contexts[0].create_qp(&request(*other_pd, cq)).map(drop));
        einval(contexts[0].create_qp(&request(*pd, other_cq)).map(drop));
        einval(contexts[0].create_cq(8, other_cq.channel().cloned()).map(drop));
        let sizes = SrqAttr { max_wr: 4, max_sge: 1, limit: 0 };
        let other_srq = contexts[1].create_srq(*other_pd, sizes, 7).unwrap();
        einval(
            contexts[0]
                .create_qp(&QpRequest { srq: Some(other_srq), ..request(*pd, cq) })
                .map(drop),
        );
        let qp = contexts[0].create_qp(&request(*pd, cq)).unwrap();
        let status = qp.status();
        assert_eq!((status.protected, &*status.why), (false, NO_JOURNAL));
        assert!(core.nics.endpoint(0).is_none() && core.nics.stands_in(0).is_none());
        assert_eq!(core.qps.get((0, qp.qpn())).map(|q| q.qpn()), Some(qp.qpn()));
        // What a later life of a logical QP is made with.
        let later = core.make_qp_on(contexts[0].own().unwrap(), 0, 0, &qp.init).map(drop);
        assert_eq!(later.unwrap_err().errno(), libc::EOPNOTSUPP);
        qp.destroy().unwrap();
    }
}
