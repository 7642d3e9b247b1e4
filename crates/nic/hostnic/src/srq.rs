//! An SRQ of the provider behind an [`Srq`]: what is posted goes there at once.

use crate::context::Context;
use crate::convert::recv_wr;
use crate::library::null_error;
use crate::{lock, Object};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, Weak};
use unbroken_types::SharedReceives;
use unbroken_verbs::abi::{ibv_pd, ibv_srq, ibv_srq_attr, ibv_srq_init_attr, PostSrqRecv};
use unbroken_verbs::{Error, Feeder, RecvWr, Result, Srq, SrqAttr};

/// See the module's text. It lives as long as the [`Srq`] that it is attached to.
pub(crate) struct HostSrq {
    context: Arc<Context>,
    pub(crate) raw: Object<ibv_srq>,
    post: PostSrqRecv,
    app: Mutex<Weak<Srq>>,
}

impl HostSrq {
    pub(crate) fn new(
        context: &Arc<Context>,
        pd: *mut ibv_pd,
        sizes: SrqAttr,
    ) -> Result<Arc<HostSrq>> {
        // SAFETY: an open context; the slots never change.
        let Some(post) = (unsafe { (*context.raw()).ops.post_srq_recv }) else {
            return Err(Error::unsupported(format!("{} has no SRQs", context.name)));
        };
        let mut attr = ibv_srq_init_attr {
            srq_context: null_mut(),
            attr: ibv_srq_attr {
                max_wr: sizes.max_wr,
                max_sge: sizes.max_sge.max(1),
                srq_limit: 0,
            },
        };
        // SAFETY: a domain that the caller keeps, and a live local.
        let raw = unsafe { context.library.create_srq(pd, &mut attr) };
        if raw.is_null() {
            return Err(null_error(&format!("{}: ibv_create_srq", context.name)));
        }
        let (context, app) = (context.clone(), Mutex::default());
        Ok(Arc::new(HostSrq { context, raw: Object(raw), post, app }))
    }

    /// What is posted to `app` comes here from now on.
    pub(crate) fn attach(self: &Arc<Self>, app: &Arc<Srq>) {
        *lock(&self.app) = Arc::downgrade(app);
        app.attach(self.clone());
    }

    /// Whether it is behind that queue.
    pub(crate) fn is_behind(&self, app: &Arc<Srq>) -> bool {
        std::ptr::eq(lock(&self.app).as_ptr(), Arc::as_ptr(app))
    }
}

impl Feeder for HostSrq {
    fn feed(&self) {
        // Held over the posts, so that they keep their order.
        let app = lock(&self.app);
        let Some(queue) = app.upgrade() else { return };
        loop {
            let mut refused = None;
            let taken = queue.take(&mut |wr| {
                let mut c = recv_wr(wr);
                let mut bad = null_mut();
                // SAFETY: a queue of ours and a live list of one.
                let code = unsafe { (self.post)(self.raw.0, &mut c, &mut bad) };
                if code != 0 {
                    refused = Some((wr.wr_id, wr.sges.to_vec()));
                }
            });
            if let Some((wr_id, sges)) = refused {
                // It is dying, or full: what is posted next tries again.
                return queue.give_back(&RecvWr { wr_id, sges: &sges });
            }
            if !taken {
                return;
            }
        }
    }
}

impl Drop for HostSrq {
    fn drop(&mut self) {
        // SAFETY: made by us; QPs that took from it are gone, since they hold it.
        unsafe { self.context.library.destroy_srq(self.raw.0) };
    }
}
