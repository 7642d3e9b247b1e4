//! What the kernel is told of a datagram, and tells, beside its bytes and its address.

use std::mem::{size_of, zeroed};

const UDP_SEGMENT: libc::c_int = 103;

/// What the IP header of a packet says beside its addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Marks {
    /// The traffic class, or TOS.
    pub(crate) class: u8,
    /// The hop limit, or TTL.
    pub(crate) hops: u8,
}

impl Default for Marks {
    /// Those of a socket that was told none.
    fn default() -> Marks {
        Marks { class: 0, hops: 64 }
    }
}

/// Room for one control message with an int.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct Control {
    pub(super) header: libc::cmsghdr,
    pub(super) value: libc::c_int,
    pad: libc::c_int,
}

impl Control {
    pub(super) fn empty() -> Control {
        // SAFETY: plain integers, for which zero is valid.
        unsafe { zeroed() }
    }

    /// A message with an int.
    pub(super) fn int(level: libc::c_int, kind: libc::c_int, value: libc::c_int) -> Control {
        let mut c = Control::empty();
        (c.header.cmsg_level, c.header.cmsg_type) = (level, kind);
        c.header.cmsg_len = (size_of::<libc::cmsghdr>() + size_of::<libc::c_int>()) as _;
        c.value = value;
        c
    }

    /// The first byte of its value.
    pub(super) fn byte(&self) -> u8 {
        self.value.to_ne_bytes()[0]
    }

    /// The UDP_SEGMENT message for segments of `bytes`.
    pub(super) fn segment(bytes: u16) -> Control {
        let mut c = Control::empty();
        c.header.cmsg_level = libc::SOL_UDP;
        c.header.cmsg_type = UDP_SEGMENT;
        c.header.cmsg_len = (size_of::<libc::cmsghdr>() + size_of::<u16>()) as _;
        c.value = libc::c_int::from_ne_bytes({
            let b = bytes.to_ne_bytes();
            [b[0], b[1], 0, 0]
        });
        c
    }
}
