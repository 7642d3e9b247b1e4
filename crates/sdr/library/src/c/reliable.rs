//! The part of `sdr_ext.h` that is about reliable writes.

use super::table::{CReliable, CTransfer, QPS, RELIABLES, TRANSFERS};
use super::{code, given, guarded, put};
use crate::{Choice, Code, Error, Objective, Reliable, ReliableOptions, Result, Scheme, Transfer};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

/// `struct sdr_reliable_attr`; the enum is read as a number, since a program may have put anything
/// there.
#[repr(C)]
struct ReliableAttr {
    scheme: u32,
    data_chunks: u32,
    parity_chunks: u32,
    objective_ppm: u32,
    parity_per_mille: u32,
    rate_limit: u32,
    first_rtt_us: u32,
    least_rto_us: u32,
    deadline_ms: u32,
    scratch_messages: u32,
}

/// `struct sdr_reliable_wr`
#[repr(C)]
struct ReliableWr {
    address: u64,
    length: u64,
    lkey: u32,
}

/// `struct sdr_reliable_counters`
#[repr(C)]
struct ReliableCounters {
    chunks_sent: u64,
    chunks_repeated: u64,
    chunks_recovered: u64,
    rtt_us: u64,
    loss_ppm: u64,
}

const MILLION: f64 = 1e6;

impl Default for ReliableAttr {
    fn default() -> ReliableAttr {
        let o = ReliableOptions::default();
        ReliableAttr {
            scheme: 1,
            data_chunks: 0,
            parity_chunks: 0,
            objective_ppm: 0,
            parity_per_mille: (o.parity * 1000.0) as u32,
            rate_limit: (o.rate_bps / 1_000_000) as u32,
            first_rtt_us: o.first_rtt.as_micros() as u32,
            least_rto_us: o.least_rto.as_micros() as u32,
            deadline_ms: o.deadline.as_millis() as u32,
            scratch_messages: o.scratch_messages as u32,
        }
    }
}

impl ReliableAttr {
    fn choice(&self) -> Result<Choice> {
        let (data, parity) = (self.data_chunks as usize, self.parity_chunks as usize);
        let scheme = match self.scheme {
            0 => Scheme::SrRto,
            1 => Scheme::SrNack,
            2 => Scheme::Ec(Code::mds(data, parity).map_err(Error::wrong)?),
            3 => Scheme::Ec(Code::xor(data, parity).map_err(Error::wrong)?),
            4 => {
                return Ok(Choice::Adaptive(match self.objective_ppm {
                    0 => Objective::Mean,
                    ppm @ 1..1_000_000 => Objective::Quantile(f64::from(ppm) / MILLION),
                    ppm => {
                        return Err(Error::wrong(format!(
                            "objective_ppm of {ppm}; below 1000000 is right, such as 999000 for \
                             999 of 1000 writes"
                        )))
                    }
                }))
            }
            n => {
                return Err(Error::wrong(format!(
                    "scheme {n}; SDR_SCHEME_SR_RTO (0) to SDR_SCHEME_ADAPTIVE (4) is right"
                )))
            }
        };
        Ok(Choice::Fixed(scheme))
    }

    fn options(&self) -> Result<ReliableOptions> {
        if self.parity_per_mille > 1000 {
            return Err(Error::wrong(format!(
                "parity_per_mille of {}; 0 to 1000 is right",
                self.parity_per_mille
            )));
        }
        if self.deadline_ms == 0 {
            return Err(Error::wrong("a deadline_ms of 0: a write takes a round trip at least"));
        }
        let choice = self.choice()?;
        let parity = f64::from(self.parity_per_mille) / 1000.0;
        if let Choice::Fixed(Scheme::Ec(code)) = choice {
            let needed = (1000 * code.parity()).div_ceil(code.data());
            if (needed as u32) > self.parity_per_mille {
                return Err(Error::wrong(format!(
                    "parity_per_mille of {}: {} chunks of parity for {} of data need {needed}",
                    self.parity_per_mille,
                    code.parity(),
                    code.data()
                )));
            }
        }
        Ok(ReliableOptions {
            choice,
            parity,
            rate_bps: u64::from(self.rate_limit) * 1_000_000,
            first_rtt: Duration::from_micros(self.first_rtt_us.into()),
            least_rto: Duration::from_micros(self.least_rto_us.into()),
            deadline: Duration::from_millis(self.deadline_ms.into()),
            scratch_messages: self.scratch_messages as usize,
        })
    }
}

#[no_mangle]
extern "C" fn sdr_reliable_attr_init(attr: *mut ReliableAttr) {
    // SAFETY: the program gives NULL, or what sdr_ext.h says.
    let _ = guarded(|| unsafe { put(attr, "attr", ReliableAttr::default()) });
}

#[no_mangle]
extern "C" fn sdr_reliable_create(qp: *mut c_void, attr: *const ReliableAttr) -> *mut c_void {
    let run = || {
        let it = QPS.get(qp)?;
        // SAFETY: the program gives NULL, or what sdr_ext.h says.
        let options = unsafe { given(attr, "attr") }?.options()?;
        let reliable = Reliable::new(&it.qp, &options)?;
        Ok(RELIABLES.add(CReliable { reliable, qp: it }))
    };
    guarded(run).unwrap_or(null_mut())
}

#[no_mangle]
extern "C" fn sdr_reliable_destroy(reliable: *mut c_void) -> c_int {
    code(|| {
        let it = RELIABLES.take(reliable)?;
        TRANSFERS.take_all(|transfer| Arc::ptr_eq(&transfer.qp, &it.qp));
        Ok(())
    })
}

type Begin = fn(&Reliable, &crate::Memory, u64, u64) -> Result<Transfer>;

fn post(
    reliable: *mut c_void,
    wr: *const ReliableWr,
    transfer: *mut *mut c_void,
    begin: Begin,
) -> Result<()> {
    let it = RELIABLES.get(reliable)?;
    // SAFETY: the program gives NULL, or what sdr_ext.h says.
    let wr = unsafe { given(wr, "wr") }?;
    // SAFETY: as above. Checked before anything is begun.
    unsafe { put(transfer, "transfer", null_mut()) }?;
    let memory = it.qp.context.memory(wr.lkey, wr.address, wr.length)?;
    let begun = begin(&it.reliable, &memory, wr.address - memory.addr(), wr.length)?;
    // SAFETY: as above.
    unsafe {
        put(transfer, "transfer", TRANSFERS.add(CTransfer { transfer: begun, qp: it.qp.clone() }))
    }
}

#[no_mangle]
extern "C" fn sdr_reliable_write_post(
    reliable: *mut c_void,
    wr: *const ReliableWr,
    transfer: *mut *mut c_void,
) -> c_int {
    code(|| post(reliable, wr, transfer, Reliable::write))
}

#[no_mangle]
extern "C" fn sdr_reliable_read_post(
    reliable: *mut c_void,
    wr: *const ReliableWr,
    transfer: *mut *mut c_void,
) -> c_int {
    code(|| post(reliable, wr, transfer, Reliable::read))
}

#[no_mangle]
extern "C" fn sdr_transfer_poll(transfer: *mut c_void, timeout_ms: u32, bytes: *mut u64) -> c_int {
    code(|| {
        let it = TRANSFERS.get(transfer)?;
        match it.transfer.wait(Duration::from_millis(timeout_ms.into())) {
            Err(Error::Retry(why)) => Err(Error::Retry(why)),
            ended => {
                TRANSFERS.take(transfer)?;
                let length = ended?;
                if !bytes.is_null() {
                    // SAFETY: not NULL, so the program gives room for the number.
                    unsafe { bytes.write(length) };
                }
                Ok(())
            }
        }
    })
}

#[no_mangle]
extern "C" fn sdr_reliable_counters_get(
    reliable: *mut c_void,
    counters: *mut ReliableCounters,
) -> c_int {
    code(|| {
        let it = RELIABLES.get(reliable)?;
        let counts = it.reliable.counts();
        let values = ReliableCounters {
            chunks_sent: counts.chunks,
            chunks_repeated: counts.repeated,
            chunks_recovered: counts.recovered,
            rtt_us: it.reliable.rtt().map_or(0, |rtt| rtt.as_micros() as u64),
            loss_ppm: (it.reliable.loss() * MILLION) as u64,
        };
        // SAFETY: the program gives NULL, or what sdr_ext.h says.
        unsafe { put(counters, "counters", values) }
    })
}
