//! A program of rdma-core in the lab: it outlives its NIC, and the other NIC has the bytes.

use std::path::Path;
use std::time::Duration;

use unbroken_lab::{Fabric, Options, Program, Result};

const LONG: Duration = Duration::from_secs(60);
const ENOUGH: u64 = 10_000_000;

/// With the command of the build that this test belongs to.
fn options() -> Options {
    let me = std::env::current_exe().expect("a test has a path");
    let command = me.ancestors().nth(2).expect("it is in target/release/deps").join("unbroken");
    assert!(command.exists(), "there is no {}; `make all` builds it", command.display());
    Options { command, ..Options::default() }
}

/// Both ends, while the client's first NIC dies.
fn killed(fabric: &Fabric, failover: bool) -> Result<(Program, Program)> {
    let port = fabric.free_port()?;
    let number = port.to_string();
    let program = ["ibv_rc_pingpong", "-d", "unb0", "-g", "0", "-s", "65536", "-n", "15000"];
    let server = [&program[..], &["-p", &number]].concat();
    let client = [&server[..], &["127.0.0.1"]].concat();
    let start = |host, program: &[&str]| match failover {
        true => fabric.start(host, program),
        false => fabric.start_without_failover(host, program),
    };
    let mut server = start("b", &server)?;
    server.wait_for_listener(port, LONG)?;
    let client = start("a", &client)?;
    fabric.nic("a/0").wait_for_traffic(ENOUGH, LONG)?;
    fabric.nic("a/0").kill()?;
    Ok((client, server))
}

#[test]
fn a_program_outlives_its_nic() -> Result<()> {
    let fabric = Fabric::with(&["a", "b"], 2, &options())?;
    let (mut client, mut server) = killed(&fabric, true)?;
    let switch = fabric.wait_for_switch("a", LONG)?;
    assert_eq!((&*switch.from, &*switch.to), ("a/0-b/0", "a/1-b/1"));
    assert!(switch.is_forced, "{switch:?}");
    client.succeed(LONG)?;
    server.succeed(LONG)?;
    let moved = fabric.assert_carried("a/1", ENOUGH..)?;
    println!("{} bytes by the other NIC", moved.bytes());
    assert_eq!(fabric.nic("a/0").state()?, "dead");
    fabric.nic("a/0").heal()?;
    assert_eq!(fabric.nic("a/0").state()?, "active");
    Ok(())
}

#[test]
fn without_failover_it_ends_with_an_error() -> Result<()> {
    let fabric = Fabric::with(&["a", "b"], 2, &options())?;
    let (mut client, mut server) = killed(&fabric, false)?;
    client.fail(LONG)?;
    fabric.assert_carried("a/1", ..=0)?;
    // What does not hold is an error with the reason.
    let said = client.succeed(LONG).unwrap_err().to_string();
    assert!(said.contains("ended with exit status"), "{said}");
    let said = fabric.assert_carried("a/1", 1..).unwrap_err().to_string();
    assert!(said.starts_with("NIC a/1 carried 0 bytes, not "), "{said}");
    server.kill();
    Ok(())
}

#[test]
fn nothing_is_left() -> Result<()> {
    let fabric = Fabric::with(&["a"], 1, &options())?;
    let program = fabric.start("a", &["sleep", "600"])?;
    let (folder, pid) = (fabric.runtime(), program.pid());
    assert!(folder.exists() && Path::new(&format!("/proc/{pid}")).exists());
    // As where an assertion fails in the middle of a test.
    let thrown = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _theirs = (program, fabric);
        panic!("an assertion");
    }));
    assert!(thrown.is_err());
    assert!(!folder.exists() && !folder.with_file_name("").exists());
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
    Ok(())
}

#[test]
fn mistakes_are_told() -> Result<()> {
    let none = Options { command: "/no/such/unbroken".into(), ..Options::default() };
    let said = Fabric::with(&["a"], 1, &none).unwrap_err().to_string();
    assert!(said.starts_with("cannot run /no/such/unbroken: "), "{said}");
    let said = Fabric::with(&["a", "a"], 1, &options()).unwrap_err().to_string();
    assert!(said.starts_with("unbroken fabric up"), "{said}");
    let fabric = Fabric::with(&["a"], 1, &options())?;
    let said = fabric.nic("c/0").traffic().unwrap_err().to_string();
    assert_eq!(said, "there is no NIC c/0; there are a/0");
    let mut program = fabric.start("a", &["sh", "-c", "echo nonsense; exit 3"])?;
    let said = program.succeed(LONG).unwrap_err().to_string();
    assert!(said.contains("exit status: 3") && said.contains("nonsense"), "{said}");
    let mut program = fabric.start("a", &["true"])?;
    assert!(program.wait_for_listener(1, LONG).is_err());
    Ok(())
}
