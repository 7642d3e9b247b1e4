//! A process without a descriptor for who asks for its status. Alone in its program, since the
//! limit is the process's.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use unbroken_events::{ProcessStatus, StatusServer};
use unbroken_runtime::Runtime;

#[test]
fn who_cannot_be_accepted_is_left_waiting_and_not_looked_at_all_the_time() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = Runtime::at(folder.path()).unwrap();
    let server = StatusServer::bind(&runtime).unwrap();
    let mut files = runtime.sockets().read_dir().unwrap().map(|entry| entry.unwrap().path());
    let socket = files.find(|path| path.extension().is_some_and(|end| end == "sock")).unwrap();
    let _client = UnixStream::connect(socket).unwrap();
    setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..getrlimit(Resource::Nofile) })
        .unwrap();
    let taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    assert!(!server.accept_one(|| unreachable!()) && server.rests());
    drop(taken);
    let began = Instant::now();
    while server.rests() {
        assert!(began.elapsed() < Duration::from_secs(20), "it rests for ever");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(server.accept_one(ProcessStatus::default) && !server.rests());
}
