//! The bound on those who have not proved themselves: by the table itself, since strangers that go
//! of themselves after a while would look the same from outside.

use super::*;

fn keeper() -> Keeper {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let door = Arc::new(Door {
        address: listener.local_addr().unwrap(),
        pid: std::process::id(),
        seats: Mutex::default(),
        waker: Waker::new().unwrap(),
    });
    Keeper { listener, door, guests: Vec::new(), next: 0, pause: Pause::default() }
}

#[test]
fn of_many_strangers_the_oldest_make_room() {
    const MORE: usize = 5;
    crate::limits::raise_descriptor_limit(4096);
    let mut keeper = keeper();
    // They stay open at their end.
    let calls: Vec<TcpStream> = (0..MAX_STRANGERS + MORE)
        .map(|_| {
            let call = TcpStream::connect(keeper.door.address).unwrap();
            keeper.accept();
            call
        })
        .collect();
    assert_eq!((keeper.strangers(), keeper.guests.len()), (MAX_STRANGERS, MAX_STRANGERS));
    assert_eq!(keeper.guests[0].number, MORE as u64, "the first have gone");
    // One that has proved itself is none of them, and stays.
    keeper.guests[0].stage = Stage::Told;
    calls.iter().take(MORE).for_each(|_| keeper.drop_oldest_stranger());
    assert_eq!(
        (keeper.strangers(), keeper.guests[0].number),
        (MAX_STRANGERS - MORE - 1, MORE as u64)
    );
}
