//! The table.

use crate::values::Values;

/// Whom a variable is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Every program that runs on our NICs.
    Programs,
    /// Collectives and PyTorch.
    Collectives,
    /// The simulator of clusters, the host edge, tests and benches.
    Others,
}

/// An environment variable.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// Whom it is for.
    pub part: Part,
    /// What it may be set to.
    pub values: Values,
    /// What holds if it is not set, in words.
    pub default: &'static str,
    /// What it says, in words.
    pub meaning: &'static str,
}

/// The runtime folder.
pub const RUNTIME: &str = "UNBROKEN_RUNTIME";
/// The host of the emulated network.
pub const HOST: &str = "UNBROKEN_HOST";
/// Addresses of interfaces instead of a host.
pub const NICS: &str = "UNBROKEN_NICS";
/// RDMA devices of the machine instead of a host.
pub const DEVICES: &str = "UNBROKEN_DEVICES";
/// By which GIDs devices of the machine are reached.
pub const GID: &str = "UNBROKEN_GID";
/// Faults of devices of the machine.
pub const DEVICE_FAULTS: &str = "UNBROKEN_DEVICE_FAULTS";
/// What NICs at these addresses can do.
pub const DEVICE: &str = "UNBROKEN_DEVICE";
/// Where processes find each other.
pub const DIRECTORY: &str = "UNBROKEN_DIRECTORY";
/// Failover.
pub const FAILOVER: &str = "UNBROKEN_FAILOVER";
/// The library below devices of the machine.
pub const LIBIBVERBS: &str = "UNBROKEN_LIBIBVERBS";
/// What is made ready beforehand.
pub const BACKUPS: &str = "UNBROKEN_BACKUPS";
/// The way back.
pub const FAILBACK: &str = "UNBROKEN_FAILBACK";
/// Where queue pairs go.
pub const MAP: &str = "UNBROKEN_MAP";
/// Second ports.
pub const APM: &str = "UNBROKEN_APM";
/// The ACK timeout of protected queue pairs.
pub const TIMEOUT: &str = "UNBROKEN_TIMEOUT";
/// Events that a switch handles.
pub const SHOW_EVENTS: &str = "UNBROKEN_SHOW_EVENTS";
/// What is told on stderr.
pub const LOG: &str = "UNBROKEN_LOG";
/// Where other ranks reach this process.
pub const COLL_ADDRESS: &str = "UNBROKEN_COLL_ADDRESS";
/// Collectives over protected queue pairs.
pub const COLL_LOGICAL: &str = "UNBROKEN_COLL_LOGICAL";
/// Collectives whose results may differ by rounding.
pub const COLL_ANY_ORDER: &str = "UNBROKEN_COLL_ANY_ORDER";
/// The shape of collectives.
pub const COLL_SHAPE: &str = "UNBROKEN_COLL_SHAPE";
/// What the link between NUMA nodes carries, for collectives.
pub const COLL_CROSS_NUMA_RATE: &str = "UNBROKEN_COLL_CROSS_NUMA_RATE";
/// What ranks of a host send each other.
pub const COLL_MEMORY_RATE: &str = "UNBROKEN_COLL_MEMORY_RATE";
/// How queue pairs of a dying plain NIC end.
pub const DEVICE_SEED: &str = "UNBROKEN_DEVICE_SEED";
/// How queue pairs of plain NICs flush.
pub const DEVICE_FLUSH: &str = "UNBROKEN_DEVICE_FLUSH";
/// The longest sleep of a NIC's thread.
pub const LONGEST_SLEEP_US: &str = "UNBROKEN_LONGEST_SLEEP_US";

const fn of(
    name: &'static str,
    part: Part,
    values: Values,
    default: &'static str,
    meaning: &'static str,
) -> Variable {
    Variable { name, part, values, default, meaning }
}

/// A variable by its name.
pub fn variable(name: &str) -> Option<&'static Variable> {
    VARIABLES.iter().find(|v| v.name == name)
}

use Part::{Collectives, Others, Programs};
use Values::{Address, Addresses, Flag, FlagOr, LogFilter, Map, Number, Text, Words};

/// A `u32` as the largest number.
const U32: u64 = u32::MAX as u64;

/// All of them, in the order of docs/reference/environment.md.
pub const VARIABLES: &[Variable] = &[
    of(
        RUNTIME,
        Programs,
        Text("a folder"),
        "$XDG_RUNTIME_DIR/unbroken, else /dev/shm/unbroken-<uid>",
        "the runtime folder: fabric, directory, event log. Best on a tmpfs: counters in it change \
         with every packet",
    ),
    of(HOST, Programs, Text("a name"), "a", "the host of the emulated network"),
    of(NICS, Programs, Addresses, "none", "addresses of interfaces, instead of a host"),
    of(
        DEVICES,
        Programs,
        Text("all, or names with commas"),
        "none",
        "RDMA devices of the machine, as ibv_devices lists them, instead of a host",
    ),
    of(
        LIBIBVERBS,
        Programs,
        Text("a name or a path"),
        "libibverbs.so.1",
        "the libibverbs that opens devices of the machine",
    ),
    of(
        GID,
        Programs,
        Text("an index, or addresses and networks with commas"),
        "the network that the program connects its first queue pair by",
        "by which GIDs peers reach these devices, and backups connect",
    ),
    of(
        DEVICE_FAULTS,
        Programs,
        Flag,
        "0",
        "on: faults can be set on these devices, as the program meets them",
    ),
    of(
        DEVICE,
        Programs,
        Words(&["full", "plain"]),
        "full",
        "with UNBROKEN_NICS: plain for NICs that can do no more than an RNIC",
    ),
    of(
        DIRECTORY,
        Programs,
        Text("lmdb, redis://…, redis+sentinel://…, redis+cluster://…, rediss… (TLS)"),
        "lmdb",
        "where processes find each other",
    ),
    of(
        "UNBROKEN_DIRECTORY_PASSWORD_FILE",
        Programs,
        Text("a file"),
        "none",
        "the file with the password of the Redis user",
    ),
    of(
        "UNBROKEN_DIRECTORY_PASSWORD",
        Programs,
        Text("a password"),
        "none",
        "the password of the Redis user itself",
    ),
    of(FAILOVER, Programs, Flag, "1", "off: failures reach the program"),
    of(FAILBACK, Programs, Flag, "1", "off: queue pairs that have moved do not return"),
    of(
        BACKUPS,
        Programs,
        Number(255),
        "all other NICs",
        "on how many other NICs of plain verbs each NIC's regions and queue pairs are made ready; \
         0: none, a switch makes what it needs",
    ),
    of(MAP, Programs, Map, "all other NICs", "where queue pairs of each NIC go"),
    of(
        APM,
        Programs,
        FlagOr(&["spread"]),
        "1",
        "off: second ports are not used; spread: each QP has a port of its own",
    ),
    of(
        TIMEOUT,
        Programs,
        Number(31),
        "0",
        "the longest ACK timeout of a protected QP, as verbs code it (4.096 µs · 2^code); 0: as \
         the program set it",
    ),
    of(
        SHOW_EVENTS,
        Programs,
        Flag,
        "0",
        "on: the program also sees the asynchronous events that a switch handles",
    ),
    of(
        LOG,
        Programs,
        LogFilter,
        "0",
        "what is told on stderr; on: what is wrong, and the reason of every error number",
    ),
    of(
        COLL_ADDRESS,
        Collectives,
        Address,
        "127.0.0.1; in PyTorch the address that leads to MASTER_ADDR",
        "the address at which other ranks reach this process",
    ),
    of(
        COLL_LOGICAL,
        Collectives,
        Flag,
        "0",
        "on: collectives use protected queue pairs and see no failure, as with Options::logical",
    ),
    of(
        COLL_ANY_ORDER,
        Collectives,
        Flag,
        "0",
        "on: reductions have the order that suits the plan, and results may differ by rounding \
         when NICs are lost, as with Options::folding",
    ),
    of(
        COLL_SHAPE,
        Collectives,
        Words(&[
            "one-shot",
            "direct",
            "stars",
            "ring",
            "bridged-ring",
            "leaves",
            "r2ccl",
            "tree",
            "rooted-tree",
            "flat-ring",
        ]),
        "the planner chooses",
        "the shape of operations that can have it, as with Options::shape; all ranks need the same",
    ),
    of(
        COLL_CROSS_NUMA_RATE,
        Collectives,
        Text("a rate: 200Gbit, say"),
        "no limit",
        "what the link between NUMA nodes carries: where a lost NIC's traffic is more, it goes \
         through a rank of the other node, as with Options::numa",
    ),
    of(
        COLL_MEMORY_RATE,
        Collectives,
        Text("a rate: 900Gbit, say"),
        "no limit",
        "what a rank sends to others of its host through memory or NVLink, beside \
         UNBROKEN_COLL_CROSS_NUMA_RATE",
    ),
    of(
        "UNBROKEN_HOSTS",
        Collectives,
        Text("names, with commas"),
        "UNBROKEN_HOST for all",
        "PyTorch: the host of each rank in the emulated network",
    ),
    of(
        "UNBROKEN_COLLECTIVE_LIBRARY",
        Collectives,
        Text("a file"),
        "beside the package, else the loader's",
        "Python: the path of libunbroken_coll.so",
    ),
    of(
        "UNBROKEN_SIMULATIONS_LIBRARY",
        Others,
        Text("a file"),
        "beside the package",
        "Python: the path of libunbroken_simulations.so",
    ),
    of(
        "UNBROKEN_EDGE",
        Others,
        Text("a folder"),
        "/run/unbroken-edge",
        "the folder of the host edge",
    ),
    of(DEVICE_SEED, Others, Number(U32), "0", "plain devices: how a dying NIC's queue pairs end"),
    of(
        DEVICE_FLUSH,
        Others,
        Words(&[
            "whole",
            "lossy",
            "no-recv-marker",
            "no-srq-flush",
            "slow-poll",
            "at-destroy",
            "nothing",
        ]),
        "whole",
        "plain devices: what becomes of the flushes of a queue pair in ERR",
    ),
    of(
        LONGEST_SLEEP_US,
        Others,
        Number(U32),
        "1000000",
        "the longest sleep of a NIC's background thread, for tests",
    ),
    of("UNBROKEN_EDGE_BFD_MS", Others, Number(U32), "10", "make figures: BFD's interval in ms"),
    of(
        "UNBROKEN_SEED",
        Others,
        Number(u64::MAX),
        "all",
        "the host edge's simulation: run this seed alone",
    ),
    of(
        "UNBROKEN_VM_SECONDS",
        Others,
        Number(U32),
        "600",
        "make test-vm: the longest that what runs in the VM may take",
    ),
];
