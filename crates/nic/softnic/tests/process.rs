//! Forked children, and several processes on one NIC.

mod common;

use common::*;
use unbroken_verbs::Device;

/// A child's verbs say EIO, and it does not keep its parent's slots.
#[test]
fn a_forked_child_lets_go() {
    let p = Pair::new();
    let mut pipe = [0; 2];
    // SAFETY: a live array of two descriptors.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    // SAFETY: the child calls verbs that answer without locks or memory, write, read, and _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let refused = |e: i32| e == libc::EIO;
        let ok = p.qa.post_send(&send(1, &[])).is_err_and(|e| refused(e.errno()))
            && p.qa.post_recv(&recv(1, &[])).is_err_and(|e| refused(e.errno()))
            && p.a
                .nic
                .create_qp(&p.a.init(unbroken_types::QpType::Rc))
                .is_err_and(|e| refused(e.errno()))
            && !p.a.nic.alive();
        p.qa.destroy();
        let answer = [u8::from(ok)];
        // SAFETY: live buffers; the parent closes its end or writes when it is done.
        unsafe {
            libc::write(pipe[1], answer.as_ptr().cast(), 1);
            libc::pause();
            libc::_exit(0);
        }
    }
    let mut answer = [9u8];
    // SAFETY: a live buffer of one byte.
    assert_eq!(unsafe { libc::read(pipe[0], answer.as_mut_ptr().cast(), 1) }, 1);
    assert_eq!(answer[0], 1, "a verb of the child did something else than EIO");
    // The parent goes on.
    p.qb.post_recv(&recv(1, &[])).unwrap();
    p.qa.post_send(&send(2, &[])).unwrap();
    assert_ok(&p.b.poll(1)[0], 1);
    assert_ok(&p.a.poll(1)[0], 2);
    // Its slot is free when it closes the NIC, though the child lives.
    let nics = p.a.nics.clone();
    drop((p.qa, p.a));
    assert_eq!(Host::with_channel(nics, 0, 16, None).nic.slot(), 0);
    // SAFETY: our own child.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
}
