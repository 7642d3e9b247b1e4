//! `getifaddrs` with the addresses of emulated NICs.
//!
//! On a machine, an address that rdma_cm binds to is that of an interface. Programs look for it
//! there: libfabric's provider `verbs` binds an id to the address of each interface that is up and
//! is not the loopback, to learn which of them lead to a device. Addresses of emulated NICs are of
//! the loopback interface. So a process that has loaded librdmacm sees an interface more for each
//! port of its NICs: `unb0`, and `unb0p2` for a second port. Other processes see none.
#![cfg(target_arch = "x86_64")]

use crate::ffi::guard;
use crate::loader::{real, Behind};
use libc::{c_int, c_void, ifaddrs, sockaddr_in};
use std::ffi::CString;
use std::mem::transmute;
use std::net::{IpAddr, Ipv4Addr};
use std::ptr::{null_mut, NonNull};
use unbroken_nics::{Network, OwnPort};

const LIBRDMACM: &std::ffi::CStr = c"librdmacm.so.1";
const FLAGS: c_int = libc::IFF_UP | libc::IFF_RUNNING | libc::IFF_BROADCAST | libc::IFF_MULTICAST;

/// An entry for a NIC's port, with the name and the addresses that it points to.
#[repr(C)]
struct Added {
    entry: ifaddrs,
    address: sockaddr_in,
    mask: sockaddr_in,
    name: CString,
}

/// What `ifa_data` of our entries points to. That of an IPv4 address is NULL otherwise, by which
/// softnic tells the machine's own interfaces.
static OURS: u8 = 0;

fn ours() -> *mut c_void {
    (&raw const OURS).cast_mut().cast()
}

/// Whether this process has loaded librdmacm.
fn connects_by_address() -> bool {
    // SAFETY: a string of ours; nothing is loaded, and the count that was raised is lowered.
    unsafe {
        let library = libc::dlopen(LIBRDMACM.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        !library.is_null() && libc::dlclose(library) == 0
    }
}

/// The ports of emulated NICs of this process.
fn emulated() -> Vec<OwnPort> {
    let network = if connects_by_address() { Network::from_env().ok() } else { None };
    network.filter(Network::is_emulated).map_or_else(Vec::new, |network| network.own().to_vec())
}

fn sockaddr(ip: Ipv4Addr) -> sockaddr_in {
    sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from(ip).to_be() },
        sin_zero: [0; 8],
    }
}

impl Added {
    fn for_port(port: &OwnPort) -> Option<NonNull<ifaddrs>> {
        let IpAddr::V4(ip) = port.ip else { return None };
        let name = match port.port {
            1 => format!("unb{}", port.nic),
            n => format!("unb{}p{n}", port.nic),
        };
        let name = CString::new(name).ok()?;
        let (address, mask) = (sockaddr(ip), sockaddr(Ipv4Addr::BROADCAST));
        // SAFETY: all zeros are an entry without anything.
        let entry = unsafe { std::mem::zeroed() };
        let added = Box::leak(Box::new(Added { entry, address, mask, name }));
        added.entry.ifa_name = added.name.as_ptr().cast_mut();
        added.entry.ifa_flags = FLAGS as u32;
        added.entry.ifa_addr = (&raw mut added.address).cast();
        added.entry.ifa_netmask = (&raw mut added.mask).cast();
        added.entry.ifa_data = ours();
        Some(NonNull::from(added).cast())
    }
}

/// Appends an entry for each port to a list.
///
/// # Safety
/// `list` is what getifaddrs has filled.
unsafe fn append(list: *mut *mut ifaddrs, ports: &[OwnPort]) {
    let mut end = list;
    // SAFETY: the entries of a list, whose last one points to none.
    while let Some(entry) = unsafe { (*end).as_mut() } {
        end = &raw mut entry.ifa_next;
    }
    for added in ports.iter().filter_map(Added::for_port) {
        // SAFETY: the end of the list; the entry is ours and is in no list.
        unsafe {
            *end = added.as_ptr();
            end = &raw mut (*added.as_ptr()).ifa_next;
        }
    }
}

/// Removes our entries from the end of a list and frees them. Returns libc's own list.
///
/// # Safety
/// `list` is what getifaddrs gave, or NULL.
unsafe fn detach(list: *mut ifaddrs) -> *mut ifaddrs {
    let (mut first, mut end) = (list, null_mut::<ifaddrs>());
    let mut next = list;
    // SAFETY: promised by the caller.
    while let Some(entry) = unsafe { next.as_ref() } {
        let at = next;
        next = entry.ifa_next;
        if entry.ifa_data != ours() {
            end = at;
            continue;
        }
        // SAFETY: made by `Added::for_port`, of which the entry is the first field; the entries of ours
        // are the last, so nobody points to this one once the one before it does not.
        unsafe {
            drop(Box::from_raw(at.cast::<Added>()));
            match end.as_mut() {
                Some(end) => end.ifa_next = null_mut(),
                None => first = null_mut(),
            }
        }
    }
    first
}

#[no_mangle]
unsafe extern "C" fn getifaddrs(list: *mut *mut ifaddrs) -> c_int {
    type Real = unsafe extern "C" fn(*mut *mut ifaddrs) -> c_int;
    // SAFETY: the address is of libc's function; the argument is the caller's.
    let done = unsafe { transmute::<usize, Real>(real(Behind::Getifaddrs))(list) };
    if done == 0 {
        guard((), || {
            let ports = emulated();
            // SAFETY: it has succeeded.
            unsafe { append(list, &ports) };
        });
    }
    done
}

#[no_mangle]
unsafe extern "C" fn freeifaddrs(list: *mut ifaddrs) {
    type Real = unsafe extern "C" fn(*mut ifaddrs);
    // SAFETY: as the caller promised; the address is of libc's function, to which a list without
    // entries of ours goes.
    unsafe {
        let rest = detach(list);
        transmute::<usize, Real>(real(Behind::Freeifaddrs))(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(mut list: *const ifaddrs) -> Vec<String> {
        let mut names = Vec::new();
        // SAFETY: a list as getifaddrs gives it.
        while let Some(entry) = unsafe { list.as_ref() } {
            // SAFETY: as above.
            let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
            names.push(name.to_str().unwrap().to_owned());
            list = entry.ifa_next;
        }
        names
    }

    #[test]
    fn entries_are_put_behind_a_list_and_taken_off_it() {
        let port = |nic, port| OwnPort { nic, port, ip: Ipv4Addr::new(127, 77, 1, 0).into() };
        let ports = [port(0, 1), port(0, 2), port(1, 1)];
        for others in [0, 1, 2] {
            // What stands for libc's entries.
            let mut own: Vec<ifaddrs> = (0..others)
                .map(|_| {
                    // SAFETY: all zeros are an entry without anything.
                    let mut entry: ifaddrs = unsafe { std::mem::zeroed() };
                    entry.ifa_name = c"eth0".as_ptr().cast_mut();
                    entry
                })
                .collect();
            for i in 1..others {
                own[i - 1].ifa_next = &raw mut own[i];
            }
            let mut list = if others > 0 { own.as_mut_ptr() } else { null_mut() };
            // SAFETY: a list as getifaddrs gives it.
            unsafe { append(&raw mut list, &ports) };
            let all = names(list);
            assert_eq!(all[others..], ["unb0", "unb0p2", "unb1"]);
            // SAFETY: as above.
            let rest = unsafe { detach(list) };
            assert_eq!(names(rest), vec!["eth0"; others]);
        }
    }
}
