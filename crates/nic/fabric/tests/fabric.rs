//! The fabric as several processes see it: every `Fabric` here has its own mapping, as another
//! process would.

use std::fs;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use unbroken_events::{read_events, What};
use unbroken_fabric::{
    now_us, Conditions, Fabric, LinkState, NicKind, NicName, Runtime, Schedule, Shape, ALL_PORTS,
};

fn runtime() -> (tempfile::TempDir, Runtime) {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(dir.path()).unwrap();
    (dir, runtime)
}

#[test]
fn a_default_fabric_exists_without_a_command() {
    let (_dir, runtime) = runtime();
    let fabric = Fabric::open(&runtime).unwrap();
    let names: Vec<&str> = fabric.hosts().iter().map(|h| h.name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c", "d"]);
    assert_eq!((fabric.nic_count("a").unwrap(), fabric.rails(), fabric.nics().count()), (4, 4, 16));
    let octet = fabric.octet();
    assert_eq!(fabric.nic_addr("a", 0).unwrap(), Ipv4Addr::new(127, octet, 1, 0));
    assert_eq!(fabric.nic_addr("d", 3).unwrap(), Ipv4Addr::new(127, octet, 4, 3));
    for nic in fabric.nics() {
        assert_eq!(
            fabric.locate(fabric.nic_addr(&nic.host, nic.index).unwrap()),
            Some(nic.at_port(1))
        );
    }
    for stranger in ["127.0.0.1", "10.0.0.1"] {
        assert_eq!(fabric.locate(stranger.parse().unwrap()), None);
    }
    assert_eq!(fabric.locate(Ipv4Addr::new(127, octet, 1, 4)), None);
    assert_eq!(Fabric::open(&runtime).unwrap().octet(), octet, "the octet stays");
    let (_other_dir, other) = self::runtime();
    assert_ne!(Fabric::open(&other).unwrap().octet(), octet, "another runtime has another");
}

#[test]
fn many_who_open_it_first_agree() {
    let (_dir, runtime) = runtime();
    let octets: Vec<u8> = std::thread::scope(|scope| {
        let all: Vec<_> =
            (0..8).map(|_| scope.spawn(|| Fabric::open(&runtime).unwrap().octet())).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(octets.iter().all(|o| *o == octets[0]), "{octets:?}");
}

#[test]
fn faults_reach_the_nics_they_concern() {
    let (_dir, runtime) = runtime();
    let (shell, nic) = (Fabric::open(&runtime).unwrap(), Fabric::open(&runtime).unwrap());
    let mut a0 = nic.nic_view("a", 0).unwrap();
    let mut b0 = nic.nic_view("b", 0).unwrap();
    let mut a1 = nic.nic_view("a", 1).unwrap();
    let mut states = || [&mut a0, &mut b0, &mut a1].map(|v| v.state(now_us()));
    let good = LinkState::GOOD;
    assert_eq!(states(), [good; 3]);
    let silent = LinkState { silent: ALL_PORTS, ..good };
    // The second ports, if there were any, hang on another switch.
    let first_silent = LinkState { silent: 1, ..good };
    let second = shell.set(&"switch rail0b down".parse().unwrap(), None).unwrap_err().to_string();
    assert!(second.contains("no switch 'rail0b'; switches are rail0, rail1, "), "{second}");
    for (fault, expected) in [
        ("nic a/0 dead", [LinkState { alive: false, ..good }, good, good]),
        ("nic a/0 down", [LinkState { down: ALL_PORTS, ..good }, good, good]),
        ("cable b/0 cut", [good, silent, good]),
        ("switch rail0 down", [first_silent, first_silent, good]),
        ("spine down", [LinkState { apart: true, ..good }; 3]),
        ("flap a/1 down=1m up=1s", [good, good, LinkState { down: ALL_PORTS, ..good }]),
        ("flap cable a/0 down=1m up=1s", [silent, good, good]),
        ("flap rail0 down=1m up=1s", [first_silent, first_silent, good]),
    ] {
        shell.set(&fault.parse().unwrap(), None).unwrap();
        assert_eq!(states(), expected, "{fault}");
        let cleared = shell.clear(Some(&fault.parse().unwrap())).unwrap();
        assert_eq!(cleared.len(), 1);
        assert_eq!(states(), [good; 3], "{fault} cleared");
    }
    shell.set(&"nic a/0 dead".parse().unwrap(), None).unwrap();
    shell.set(&"loss a/0 1%".parse().unwrap(), None).unwrap();
    shell.set(&"loss a/0 2%".parse().unwrap(), None).unwrap();
    let listed: Vec<String> = shell.list().iter().map(|f| f.fault.to_string()).collect();
    assert_eq!(listed, ["nic a/0 dead", "loss a/0 2%"]);
    assert!(shell.clear(Some(&"nic a/1".parse().unwrap())).unwrap().is_empty());
    let (state, faults) = shell.nic_state(&"a/0".parse().unwrap()).unwrap();
    assert!(!state.alive && faults.len() == 2);
    assert_eq!(shell.clear(None).unwrap().len(), 2);
    assert!(nic.list().is_empty());
}

#[test]
fn impairments_strike_the_way_and_the_place_they_name() {
    let (_dir, runtime) = runtime();
    let fabric = Fabric::open(&runtime).unwrap();
    let (mut a0, mut b0) = (fabric.nic_view("a", 0).unwrap(), fabric.nic_view("b", 0).unwrap());
    let mut losses = |fault: &str| {
        fabric.set(&fault.parse().unwrap(), None).unwrap();
        let both = [&mut a0, &mut b0].map(|v| {
            let state = v.state(now_us());
            let [losses, second] = v.conditions().map(|port| port.map(share_and_rate));
            assert_eq!(state.impaired != 0, losses != [0, 0], "{fault}");
            assert!(
                second == losses || fault.contains("rail"),
                "of all ports, but a switch has one of them: {fault}"
            );
            losses
        });
        fabric.clear(Some(&fault.parse().unwrap())).unwrap();
        both
    };
    assert_eq!(losses("loss a/0 1%"), [[1, 1], [0, 0]]);
    assert_eq!(losses("loss a/0 tx 1%"), [[1, 0], [0, 0]]);
    assert_eq!(losses("loss cable a/0 rx 1%"), [[0, 1], [0, 0]]);
    assert_eq!(losses("loss rail0 1%"), [[1, 0], [1, 0]], "a packet crosses a switch once");
    assert_eq!(losses("loss rail0 rx 1%"), [[0, 1], [0, 1]]);
    assert_eq!(losses("rate rail0 7Mbit"), [[7, 7], [7, 7]], "every port");
    assert_eq!(losses("loss rail1 1%"), [[0, 0], [0, 0]]);
    // Each change of the conditions is a change of the state.
    let mut view = fabric.nic_view("a", 0).unwrap();
    let mut states = std::collections::HashSet::new();
    for share in ["1%", "2%", "3%"] {
        fabric.set(&format!("loss a/0 {share}").parse().unwrap(), None).unwrap();
        assert!(states.insert(view.state(now_us()).impaired));
    }
    fabric.set(&"nic b/0 dead".parse().unwrap(), None).unwrap();
    assert!(!states.insert(view.state(now_us()).impaired), "of another NIC");
}

/// Percent and Mbit/s, whichever there is.
fn share_and_rate(c: Conditions) -> u32 {
    c.loss_ppm / 10_000 + (c.rate_bits_per_s / 1_000_000) as u32
}

#[test]
fn impairments_strike_the_port_they_name() {
    let (_dir, runtime) = runtime();
    let kind = NicKind { ports: 2, ..NicKind::default() };
    let shape = Shape { kind, ..Shape::standard(0) };
    let fabric = Fabric::create(&runtime, &shape).unwrap();
    let mut view = fabric.nic_view("a", 0).unwrap();
    let mut ports = |faults: &[&str]| {
        faults.iter().for_each(|fault| drop(fabric.set(&fault.parse().unwrap(), None).unwrap()));
        view.state(now_us());
        let found = view.conditions().map(|port| port.map(share_and_rate));
        let told =
            [1, 2].map(|port| fabric.nic_state(&NicName::new("a", 0).at_port(port)).unwrap());
        for ((state, told), found) in told.iter().zip(&found) {
            assert_eq!(
                (state.impaired != 0, told.is_empty()),
                (*found != [0, 0], *found == [0, 0]),
                "{faults:?}"
            );
        }
        fabric.clear(None).unwrap();
        found
    };
    assert_eq!(ports(&["loss a/0/2 1%"]), [[0, 0], [1, 1]]);
    assert_eq!(ports(&["loss cable a/0/1 rx 1%"]), [[0, 1], [0, 0]]);
    assert_eq!(ports(&["rate rail0b 7Mbit"]), [[0, 0], [7, 7]]);
    assert_eq!(ports(&["loss rail0 1%", "loss rail0b rx 2%"]), [[1, 0], [0, 2]]);
    assert_eq!(ports(&["loss a/0 50%", "loss a/0/2 50%"]), [[50, 50], [75, 75]], "they add up");
    assert_eq!(ports(&["loss a/1/2 1%", "loss rail1b 1%"]), [[0, 0], [0, 0]]);
}

#[test]
fn a_schedule_is_a_function_of_time() {
    let (_dir, runtime) = runtime();
    let fabric = Fabric::open(&runtime).unwrap();
    let ms = Duration::from_millis;
    let mut view = fabric.nic_view("a", 0).unwrap();
    let mut up =
        |from_us: u64, at_ms: [u64; 4]| at_ms.map(|ms| view.state(from_us + ms * 1000).port_up(1));
    let when = Schedule { at: ms(60_000), lasts: Some(ms(10)), every: Some(ms(50)) };
    let set = fabric.schedule(&"nic a/0 down".parse().unwrap(), &when).unwrap();
    assert_eq!(up(set.from_us, [0, 10, 50, 60]), [false, true, false, true]);
    let once = Schedule { every: None, ..when };
    let set = fabric.schedule(&"nic a/0 down".parse().unwrap(), &once).unwrap();
    assert_eq!(up(set.from_us, [0, 9, 10, 50]), [false, false, true, true]);
    assert_eq!(fabric.list().len(), 1, "replaced");
    fabric.clear(None).unwrap();
    let set = fabric.set(&"flap a/0 down=20ms up=80ms".parse().unwrap(), None).unwrap();
    assert_eq!(up(set.from_us, [0, 20, 100, 120]), [false, true, false, true]);
    fabric.clear(None).unwrap();
    // The same fault at two times, set as one.
    let twice = [ms(60_000), ms(60_100)]
        .map(|at| ("nic a/0 down".parse().unwrap(), Schedule { at, ..once }));
    let set = fabric.schedule_all(&twice).unwrap();
    assert_eq!(up(set[0].from_us, [0, 10, 100, 110]), [false, true, false, true]);
    let errors = [
        ("nic a/0 down", Schedule { lasts: None, ..when }, "say for how long"),
        ("nic a/0 down", Schedule { lasts: when.every, ..when }, "before it is over"),
        ("nic a/0 down", Schedule { every: Some(ms(1)), ..when }, "every 2ms at most"),
        ("flap a/0 down=1s up=1s", when, "by itself"),
    ];
    for (fault, when, hint) in errors {
        let error = fabric.schedule(&fault.parse().unwrap(), &when).unwrap_err().to_string();
        assert!(error.contains(hint), "{error}");
    }
}

#[test]
fn faults_that_are_over_make_room() {
    let (_dir, runtime) = runtime();
    let fabric = Fabric::open(&runtime).unwrap();
    let brief = Schedule { lasts: Some(Duration::from_micros(1)), ..Schedule::default() };
    let all = vec![("nic a/0 down".parse().unwrap(), brief); 256];
    let last = fabric.schedule_all(&all).unwrap().pop().unwrap();
    while now_us() <= last.from_us + 1 {}
    assert!(fabric.list().is_empty());
    let later = Schedule { at: Duration::from_secs(60), ..Schedule::default() };
    fabric.schedule_all(&vec![("nic a/0 down".parse().unwrap(), later); 256]).unwrap();
    let full = fabric.set(&"nic a/1 down".parse().unwrap(), None).unwrap_err().to_string();
    assert!(full.contains("256 faults"), "{full}");
    assert!(fabric.schedule_all(&all[..1]).is_err());
    assert_eq!(fabric.clear(None).unwrap().len(), 256);
    // Each beginning is in the log, and each end that is known.
    let events = read_events(&runtime).unwrap();
    let begun = events.iter().filter(|e| matches!(e.what, What::Fault { .. })).count();
    assert_eq!((begun, events.len()), (512, 1024));
}

#[test]
fn a_wqe_error_has_the_time_at_which_it_fell_due() {
    let (_dir, runtime) = runtime();
    let fabric = Fabric::open(&runtime).unwrap();
    let mut view = fabric.nic_view("a", 0).unwrap();
    let when = Schedule {
        at: Duration::from_secs(60),
        every: Some(Duration::from_millis(5)),
        ..Schedule::default()
    };
    let from_us = fabric.schedule(&"wqe-error a/0".parse().unwrap(), &when).unwrap().from_us;
    let due = [from_us - 1, from_us, from_us + 4_999, from_us + 5_000]
        .map(|t| view.state(t).wqe_error_us);
    assert_eq!(due, [0, from_us, from_us, from_us + 5_000]);
    assert!(view.state(from_us).passes(1));
}

#[test]
fn a_fault_with_a_time_needs_nobody_to_wait_for_it() {
    let (_dir, runtime) = runtime();
    let fabric = Fabric::open(&runtime).unwrap();
    let mut view = fabric.nic_view("a", 0).unwrap();
    let set =
        fabric.set(&"nic a/0 dead".parse().unwrap(), Some(Duration::from_secs(3600))).unwrap();
    let now_us = now_us();
    assert!(set.from_us > now_us + 3_000_000_000);
    assert!(view.state(now_us).alive);
    assert!(view.state(set.from_us - 1).alive);
    assert!(!view.state(set.from_us).alive);
    let events = read_events(&runtime).unwrap();
    assert_eq!(
        events[0].what,
        What::Fault { fault: "nic a/0 dead".into(), lasts_us: None, every_us: None }
    );
    assert_eq!(events[0].time_us, set.from_us);
    fabric.clear(None).unwrap();
    assert!(view.state(set.from_us).alive);
    assert_eq!(
        read_events(&runtime).unwrap()[0].what,
        What::FaultClear { fault: "nic a/0 dead".into() }
    );
}

#[test]
fn waiting_ends_with_a_change_a_due_fault_or_the_time() {
    let (_dir, runtime) = runtime();
    let fabric = Fabric::open(&runtime).unwrap();
    let seen = fabric.generation();
    assert_eq!(fabric.wait_change(seen, now_us(), 1_000), seen);
    // Set by another process while this one waits.
    let since_us = now_us();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| fabric.wait_change(seen, since_us, 60_000_000));
        Fabric::open(&runtime).unwrap().set(&"nic a/0 down".parse().unwrap(), None).unwrap();
        assert_ne!(waiter.join().unwrap(), seen);
    });
    assert!(now_us() - since_us < 30_000_000);
    // Due later: the wait ends then, not after a minute.
    let set =
        fabric.set(&"nic a/1 dead".parse().unwrap(), Some(Duration::from_millis(20))).unwrap();
    let (seen, since_us) = (fabric.generation(), now_us());
    let mut view = fabric.nic_view("a", 1).unwrap();
    while view.state(now_us()).alive {
        assert_eq!(fabric.wait_change(seen, since_us, 60_000_000), seen);
    }
    assert!(now_us() - set.from_us < 30_000_000);
    // Looked before it fell due, waits after: it must not sleep.
    let began_us = now_us();
    fabric.wait_change(seen, set.from_us - 1, 60_000_000);
    assert!(now_us() - began_us < 30_000_000);
}

#[test]
fn readers_see_whole_tables_while_writers_write() {
    let (_dir, runtime) = runtime();
    let fabric = Fabric::open(&runtime).unwrap();
    // The cable and the switch fail and heal as one; a torn read would show a NIC that neither rule
    // allows.
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for host in ["a", "b"] {
            let (done, runtime) = (&done, &runtime);
            scope.spawn(move || {
                let fabric = Fabric::open(runtime).unwrap();
                for n in 1..=200u32 {
                    fabric
                        .set(&format!("loss {host}/0 {}%", n % 100 + 1).parse().unwrap(), None)
                        .unwrap();
                }
                done.store(true, Ordering::Relaxed);
            });
        }
        let mut view = fabric.nic_view("a", 0).unwrap();
        while !done.load(Ordering::Relaxed) {
            let state = view.state(now_us());
            let [[tx, rx], second] = *view.conditions();
            assert!(state.passes(1) && tx == rx && second == [tx, rx] && tx.loss_ppm % 10_000 == 0);
        }
    });
    assert_eq!(fabric.list().len(), 2);
}

#[test]
fn unknown_names_list_the_known() {
    let (_dir, runtime) = runtime();
    let fabric = Fabric::open(&runtime).unwrap();
    let error = |fault: &str| fabric.set(&fault.parse().unwrap(), None).unwrap_err().to_string();
    assert_eq!(
        error("nic a/9 dead"),
        "there is no NIC 'a/9'; NICs of this host are a/0, a/1, a/2, a/3"
    );
    assert_eq!(error("cable x/0 cut"), "there is no host 'x'; hosts are a, b, c, d");
    assert!(error("switch rail7 down").contains("switches are rail0, rail1, rail2, rail3"));
    assert!(fabric
        .clear(Some(&"nic z/0".parse().unwrap()))
        .unwrap_err()
        .to_string()
        .contains("hosts are"));
    assert!(fabric.nic_addr("a", 4).is_err() && fabric.nic_view("e", 0).is_err());
    assert!(read_events(&runtime).unwrap().is_empty(), "an error changes nothing");
}

#[test]
fn a_damaged_file_is_an_error_that_names_it() {
    let (_dir, runtime) = runtime();
    fs::write(runtime.fabric_toml(), "version = 1\noctet = 5\n[[host]]\nname = \"a\"\n").unwrap();
    let text = Fabric::open(&runtime).err().unwrap().to_string();
    assert!(text.contains("fabric.toml:3: ") && text.contains("number"), "{text}");
    fs::remove_file(runtime.fabric_toml()).unwrap();
    Fabric::open(&runtime).unwrap();
    fs::write(runtime.fabric_page(), "garbage").unwrap();
    let text = Fabric::open(&runtime).err().unwrap().to_string();
    assert!(text.contains("fabric.page") && text.contains("UNBROKEN_RUNTIME"), "{text}");
}

#[test]
fn a_fabric_can_be_made_and_removed() {
    let (_dir, runtime) = runtime();
    let fabric = Fabric::create(&runtime, &Shape::of(0, &["x", "y"], 2)).unwrap();
    assert_eq!((fabric.hosts().len(), fabric.rails()), (2, 2));
    let text = Fabric::create(&runtime, &Shape::standard(0)).err().unwrap().to_string();
    assert!(text.contains("fabric down"), "{text}");
    Fabric::remove(&runtime).unwrap();
    assert!(!runtime.fabric_toml().exists());
    Fabric::remove(&runtime).unwrap();
    assert_eq!(Fabric::open(&runtime).unwrap().hosts().len(), 4);
    let text = Fabric::create(&runtime, &Shape::of(0, &["x-y"], 2)).err().unwrap().to_string();
    assert!(text.contains("already"), "{text}");
}
