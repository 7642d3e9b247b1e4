use super::*;

const GOOD: &str = r#"name = "h1"
loopback = "10.255.0.1"
asn = 65001

[[uplink]]
device = "p1"
address = "10.1.1.1/31"
peer = "10.1.1.0"
peer_asn = 65101
peer_loopback = "10.255.1.1"

[[tenant]]
vni = 100

[[tenant.port]]
representor = "rep0"
veth = "vf0"
mac = "02:00:00:00:00:01"
address = "192.168.9.1/24"
"#;

const SECOND: &str = r#"[[uplink]]
device = "p2"
address = "10.2.1.1/31"
peer = "10.2.1.0"
peer_asn = 65102
peer_loopback = "10.255.1.1"
[[tenant]]"#;

#[test]
fn a_good_file_is_read() {
    let config = Config::parse(GOOD).unwrap();
    assert_eq!((config.asn, config.role, config.rules), (65001, Role::Host, Rules::None));
    assert_eq!(
        (config.tenants[0].anchor(), config.tenants[0].bridge()),
        ("vni100".into(), "unb100".into())
    );
    assert_eq!(config.overlay(), None);
    let settings = Config::parse(&GOOD.replace("\nloopback", "\nrules = \"skip_hw\"\nloopback"))
        .unwrap()
        .overlay()
        .unwrap();
    assert_eq!(settings.tenants[0].ports, ["rep0"]);
}

const NIC: &str = "[[nic]]\npci = \"0000:03:00.0\"\nvirtual_functions = 2\n";

#[test]
fn a_nic_is_read() {
    let text = GOOD.replacen("[[uplink]]", &format!("{NIC}[[uplink]]"), 1);
    assert_eq!(
        Config::parse(&text).unwrap().nics,
        [Nic { pci: "0000:03:00.0".into(), functions: 2, line: 6 }]
    );
    let cases = [
        (
            "0000:03:00.0",
            "0000:03:00:0",
            "line 6: '0000:03:00:0' is not an address of a PCI device",
        ),
        ("0000:03:00.0", "../../:03:.0", "is not an address of a PCI device"),
        ("= 2", "= 1025", "line 7: virtual_functions is 1025; it may be 0 to 1024"),
        (NIC, &NIC.repeat(2), "line 9: the NIC 0000:03:00.0 is named twice"),
    ];
    for (from, to, why) in cases {
        let error = Config::parse(&text.replacen(from, to, 1)).unwrap_err();
        assert!(error.to_string().contains(why), "{to}: {error}");
    }
}

#[test]
fn an_error_names_the_line_and_the_value() {
    let cases = [
        ("asn = 65001", "asn = 0", "line 3: asn is 0; it may be 1 to"),
        ("asn = 65001", "asn = 65001\nfast = true", "line 4: unknown field"),
        ("10.255.0.1", "10.255.0", "line 2: '10.255.0' is not an IPv4 address"),
        ("10.1.1.1/31", "10.1.1.1", "line 7: '10.1.1.1' is not an address with a length"),
        (
            "peer = \"10.1.1.0\"",
            "peer = \"10.1.2.0\"",
            "line 8: the peer 10.1.2.0 must be another address in",
        ),
        (
            "\"p1\"",
            "\"a name that is too long\"",
            "line 6: 'a name that is too long' is not a name",
        ),
        ("10.255.1.1", "10.255.0.1", "line 6: the peer's loopback 10.255.0.1 is our own"),
        ("[[tenant]]", SECOND, "line 13: two uplinks to 10.255.1.1 have different peer_asn"),
        ("vni = 100", "vni = 16777216", "line 13: vni is 16777216; it may be 1 to 16777215"),
        ("veth = \"vf0\"", "veth = \"p1\"", "line 16: the device name 'p1' is taken"),
        ("02:00:00:00:00:01", "02:00:00", "line 18: '02:00:00' is not a MAC address"),
        (
            "02:00:00:00:00:01",
            "01:00:5e:00:00:01",
            "line 16: the mac of a port must be that of one station",
        ),
        ("veth = \"vf0\"\n", "", "line 16: address is for a port that has veth, or device"),
        ("veth = \"vf0\"\n", "netns = \"n\"\n", "line 16: netns is for a port that has veth"),
        (
            "veth = \"vf0\"\n",
            "veth = \"vf0\"\ndevice = \"vf1\"\n",
            "line 16: a port has veth or device, and not both",
        ),
        (
            "[[tenant]]",
            "[bfd]\ninterval_ms = 5\nmultiplier = 3\n[[tenant]]",
            "bfd: interval_ms may be 10 to 60000",
        ),
        ("name =", "role = \"switch\"\nname =", "line 14: a switch has no tenants"),
        ("name =", "name", "line 1:"),
    ];
    for (from, to, why) in cases {
        let text = GOOD.replacen(from, to, 1);
        assert_ne!(text, GOOD);
        let error = Config::parse(&text).unwrap_err();
        assert!(error.to_string().contains(why), "{to}: {error}");
    }
}

/// What FRR, or the kernel, would take without a word, and no packet would ever pass.
#[test]
fn what_cannot_carry_a_packet_is_refused() {
    let second = SECOND.replace("10.255.1.1\"", "10.255.1.2\"");
    let overlap = second.replace("10.2.1.", "10.1.1.").replace("10.1.1.0\"", "10.1.1.2\"");
    let overlap = overlap.replace("10.1.1.1/31", "10.1.1.3/29");
    let cases = [
        ("peer_asn = 65101", "peer_asn = 65001", "line 9: peer_asn is 65001, and so is our own"),
        ("peer_asn = 65101", "peer_asn = 0", "line 9: peer_asn is 0; it may be 1 to 4294967294"),
        ("10.255.0.1", "0.0.0.0", "line 2: 0.0.0.0 is the address of no machine; give one as"),
        ("10.255.0.1", "224.0.0.5", "line 2: 224.0.0.5 is the address of no machine"),
        ("10.255.0.1", "127.0.0.1", "line 2: 127.0.0.1 is the address of no machine"),
        ("10.255.1.1", "0.0.0.0", "line 10: 0.0.0.0 is the address of no machine"),
        ("10.1.1.1/31", "0.0.0.0/31", "line 7: 0.0.0.0/31 is no address of a machine in a"),
        ("10.1.1.1/31", "10.1.1.1/0", "line 7: 10.1.1.1/0 is no address of a machine in a"),
        ("10.1.1.1/31", "10.1.1.1/32", "line 7: 10.1.1.1/32 is no address of a machine in a"),
        ("10.1.1.1/31", "10.1.1.7/29", "line 7: 10.1.1.7/29 is no address of a machine in a"),
        ("peer = \"10.1.1.0\"", "peer = \"0.0.0.0\"", "line 8: 0.0.0.0 is the address of no"),
        ("192.168.9.1/24", "192.168.9.0/24", "line 19: 192.168.9.0/24 is no address of a machine"),
        ("10.255.0.1", "10.1.1.0", "line 6: the loopback 10.1.1.0 is in the network of 10.1.1.1"),
        ("10.255.1.1", "10.1.1.0", "line 6: peer_loopback 10.1.1.0 is in the network of 10.1.1.1"),
        ("[[tenant]]", &overlap, "line 13: 10.1.1.3/29 of p2 and 10.1.1.1/31 of p1 overlap"),
    ];
    for (from, to, why) in cases {
        let text = GOOD.replacen(from, to, 1);
        assert_ne!(text, GOOD);
        let error = Config::parse(&text).expect_err(to).to_string();
        assert!(error.contains(why), "{to}: {error}");
    }
    Config::parse(&GOOD.replacen("[[tenant]]", &second, 1)).unwrap();
    Config::parse(&GOOD.replacen("192.168.9.1/24", "192.168.9.1/31", 1)).unwrap();
}

#[test]
fn what_needs_devices_to_be_made_anew_cannot_follow() {
    let up = Config::parse(GOOD).unwrap();
    let second = SECOND.replace("10.255.1.1\"", "10.255.1.2\"");
    for (from, to) in [
        ("asn = 65001", "asn = 65002\nresync_s = 2\nfast_failover = true\nrules = \"both\""),
        ("peer_asn = 65101", "peer_asn = 65103"),
        ("[[tenant]]", second.as_str()),
        ("[[tenant]]", "[[tenant]]\nvni = 7\n[[tenant]]"),
        (
            "[[tenant.port]]",
            "[[tenant.port]]\nrepresentor = \"r1\"\nveth = \"v1\"\n[[tenant.port]]",
        ),
        ("name = ", "\n\n# only lines move\nname = "),
    ] {
        Config::parse(&GOOD.replacen(from, to, 1)).unwrap().can_follow(&up).expect(to);
    }
    let cases = [
        ("10.255.0.1", "10.255.0.9", "line 2: loopback is 10.255.0.9, and 10.255.0.1 in the edge"),
        ("\nasn", "\nmtu = 1400\nasn", "line 3: mtu is 1400, and 1450 in the edge that is up"),
        ("\"p1\"", "\"p9\"", "the uplink p1 of the edge that is up is gone"),
        ("10.1.1.1/31", "10.1.1.1/30", "line 6: p1 has 10.1.1.1/31 in the edge that is up"),
        ("vni = 100", "vni = 101", "the tenant 100 of the edge that is up is gone"),
        ("rep0", "rep1", "line 13: the port rep0 of the edge that is up is gone"),
        ("192.168.9.1", "192.168.9.2", "line 16: the port rep0 is another in the edge that is up"),
    ];
    for (from, to, why) in cases {
        let text = GOOD.replacen(from, to, 1).replace("peer = \"10.1.1.0\"", "peer = \"10.1.1.2\"");
        let text = if to == "10.1.1.1/30" { text } else { GOOD.replacen(from, to, 1) };
        let error = Config::parse(&text).unwrap().can_follow(&up).expect_err(to).to_string();
        assert!(error.contains(why) && error.contains("`unbroken edge down` first"), "{error}");
    }
}

#[test]
fn a_file_that_would_be_waited_for_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("edge.toml");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for path in [&fifo, Path::new("/dev/zero")] {
        let why = Config::read(path).unwrap_err().to_string();
        assert_eq!(why, format!("{}: it is not a regular file", path.display()));
    }
}
