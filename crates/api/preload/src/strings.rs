//! Names of the numbers of verbs, as libibverbs spells them.

use std::ffi::{c_char, c_int, CStr};

/// The name at `code`, or the one for codes that do not exist.
fn name(names: &'static [&'static CStr], code: c_int, unknown: &'static CStr) -> *const c_char {
    usize::try_from(code).ok().and_then(|i| names.get(i)).unwrap_or(&unknown).as_ptr()
}

#[no_mangle]
extern "C" fn ibv_node_type_str(node_type: c_int) -> *const c_char {
    const NAMES: &[&CStr] = &[
        c"unknown",
        c"InfiniBand channel adapter",
        c"InfiniBand switch",
        c"InfiniBand router",
        c"iWARP NIC",
        c"usNIC",
        c"usNIC UDP",
        c"unspecified",
    ];
    name(NAMES, node_type, c"unknown")
}

#[no_mangle]
extern "C" fn ibv_port_state_str(state: c_int) -> *const c_char {
    const NAMES: &[&CStr] =
        &[c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"];
    name(NAMES, state, c"unknown")
}

#[no_mangle]
extern "C" fn ibv_event_type_str(event: c_int) -> *const c_char {
    const NAMES: &[&CStr] = &[
        c"CQ error",
        c"local work queue catastrophic error",
        c"invalid request local work queue error",
        c"local access violation work queue error",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration request error",
        c"local catastrophic error",
        c"port active",
        c"port error",
        c"LID change",
        c"P_Key change",
        c"SM change",
        c"SRQ catastrophic error",
        c"SRQ limit reached",
        c"last WQE reached",
        c"client reregistration",
        c"GID table change",
        c"WQ fatal",
    ];
    name(NAMES, event, c"unknown")
}

#[no_mangle]
extern "C" fn ibv_wc_status_str(status: c_int) -> *const c_char {
    const NAMES: &[&CStr] = &[
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"Work Request Flushed Error",
        c"memory management operation error",
        c"bad response error",
        c"local access error",
        c"remote invalid request error",
        c"remote access error",
        c"remote operation error",
        c"transport retry counter exceeded",
        c"RNR retry counter exceeded",
        c"local RDD violation error",
        c"remote invalid RD request",
        c"aborted error",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout error",
        c"general error",
        c"TM error",
        c"TM software rendezvous",
    ];
    name(NAMES, status, c"unknown")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_name() {
        let text = |p: *const c_char| {
            // SAFETY: the functions give static text.
            unsafe { CStr::from_ptr(p) }.to_str().unwrap()
        };
        assert_eq!(text(ibv_wc_status_str(12)), "transport retry counter exceeded");
        assert_eq!(text(ibv_event_type_str(10)), "port error");
        assert_eq!(text(ibv_port_state_str(4)), "active");
        assert_eq!(text(ibv_node_type_str(1)), "InfiniBand channel adapter");
        for f in [ibv_wc_status_str, ibv_event_type_str, ibv_port_state_str, ibv_node_type_str] {
            assert_eq!(text(f(-1)), "unknown");
            assert_eq!(text(f(c_int::MAX)), "unknown");
        }
    }
}
