//! The bound on those who have not proved themselves: by the table itself, since strangers that go
//! of themselves after a while would look the same from outside.

use super::*;

fn accept_loop() -> AcceptLoop {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let acceptor = Arc::new(Acceptor {
        address: listener.local_addr().unwrap(),
        pid: std::process::id(),
        services: Mutex::default(),
        waker: Waker::new().unwrap(),
    });
    AcceptLoop { listener, acceptor, pending: Vec::new(), next: 0, pause: Pause::default() }
}

#[test]
fn of_many_strangers_the_oldest_make_room() {
    const MORE: usize = 5;
    crate::limits::raise_descriptor_limit(4096);
    let mut accept_loop = accept_loop();
    // They stay open at their end.
    let calls: Vec<TcpStream> = (0..MAX_UNPROVEN + MORE)
        .map(|_| {
            let call = TcpStream::connect(accept_loop.acceptor.address).unwrap();
            accept_loop.accept();
            call
        })
        .collect();
    assert_eq!((accept_loop.unproven(), accept_loop.pending.len()), (MAX_UNPROVEN, MAX_UNPROVEN));
    assert_eq!(accept_loop.pending[0].number, MORE as u64, "the first have gone");
    // One that has proved itself is none of them, and stays.
    accept_loop.pending[0].stage = Stage::Told;
    calls.iter().take(MORE).for_each(|_| accept_loop.drop_oldest_unproven());
    assert_eq!(
        (accept_loop.unproven(), accept_loop.pending[0].number),
        (MAX_UNPROVEN - MORE - 1, MORE as u64)
    );
}
