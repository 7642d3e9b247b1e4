//! Single cases that the random worlds of `world.rs` do not come to, or do not name.

use unbroken_journal::{Config, Journal, Mutation, Posted, Queue, Slot, Step};
use unbroken_types::{
    Backlog, Completions, Messages, PostError, QpCaps, QpState, RecvEntry, RecvWr, SendBatch,
    SendEntry, SendFlags, SendOpcode, SendWr, Sge, Wc, WcStatus,
};

const CAPS: QpCaps =
    QpCaps { max_send_wr: 4, max_recv_wr: 2, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 8 };

#[derive(Default)]
struct Out(Vec<(char, u64, u32)>);

impl Completions for Out {
    fn send(&mut self, wc: Wc) {
        self.0.push(('s', wc.wr_id, wc.status));
    }
    fn recv(&mut self, wc: Wc, _: bool) {
        self.0.push(('r', wc.wr_id, wc.status));
    }
}

impl Out {
    fn take(&mut self) -> Vec<(char, u64, u32)> {
        std::mem::take(&mut self.0)
    }
}

const FLUSH: u32 = WcStatus::WrFlushErr as u32;
const RETRY: u32 = WcStatus::RetryExcErr as u32;
const ACCESS: u32 = WcStatus::RemAccessErr as u32;

fn journal(shared_receives: bool) -> Journal {
    let config = Config {
        caps: CAPS,
        wc_qpn: 9,
        sq_sig_all: false,
        shared_receives,
        mutation: Mutation::None,
    };
    let mut journal = Journal::new(config);
    journal.open();
    journal.start();
    journal
}

fn wr(wr_id: u64, opcode: SendOpcode, signaled: bool) -> SendWr<'static> {
    SendWr {
        wr_id,
        opcode,
        flags: if signaled { SendFlags::SIGNALED } else { SendFlags::default() },
        ..SendWr::default()
    }
}

fn send(j: &mut Journal, out: &mut Out, wr_id: u64, signaled: bool) -> u64 {
    match j.post_send(&wr(wr_id, SendOpcode::Send, signaled), out).unwrap() {
        Posted::Give(number) => number,
        Posted::Kept => panic!("send {wr_id} is kept"),
    }
}

fn recv(j: &mut Journal, out: &mut Out, wr_id: u64) -> Option<u64> {
    match j.post_recv(&RecvWr { wr_id, sges: &[] }, out).unwrap() {
        Posted::Give(number) => Some(number),
        Posted::Kept => None,
    }
}

fn come(j: &mut Journal, out: &mut Out, wr_id: u64, status: u32) -> Vec<(char, u64, u32)> {
    j.handle_wc(5, &Wc { wr_id, status, ..Wc::default() }, out);
    out.take()
}

fn stop_in_error(j: &mut Journal, out: &mut Out) {
    assert_eq!(j.stop(0, out), Step::ToErr);
    j.in_error();
    assert_eq!(j.stop(0, out), Step::Mark(Queue::Send));
    j.marked(Queue::Send);
}

#[test]
fn what_the_peer_has_executed_completes_between_reads_that_are_read_again() {
    let (mut j, mut out) = (
        Journal::new(Config {
            caps: CAPS,
            wc_qpn: 9,
            sq_sig_all: false,
            shared_receives: false,
            mutation: Mutation::None,
        }),
        Out::default(),
    );
    let entry = |wr_id, opcode, signaled, executed| SendEntry {
        started: true,
        executed,
        ..SendEntry::from(&wr(wr_id, opcode, signaled))
    };
    let sends = vec![
        entry(1, SendOpcode::Write, true, true),
        entry(2, SendOpcode::Read, false, false),
        entry(3, SendOpcode::Send, true, true),
        entry(4, SendOpcode::Write, true, false),
    ];
    let recvs = vec![RecvEntry { wr_id: 8, sges: vec![Sge { addr: 3, length: 4, lkey: 5 }] }];
    let backlog = Backlog { sends, recvs, ..Backlog::default() };
    j.adopt(&backlog, &mut out).unwrap();
    assert_eq!(
        j.adopt(&backlog, &mut out),
        Err(PostError::WrongState(unbroken_types::QpState::Err))
    );
    assert!(
        j.next_send(&mut out).is_none() && j.next_recv().is_none(),
        "the provider takes none yet"
    );
    j.open();
    assert_eq!(j.next_recv().unwrap().sges[0].addr, 3);
    j.gave_recv();
    assert!(j.next_recv().is_none());
    j.start();
    // What is posted now goes behind what waits.
    assert_eq!(j.post_send(&wr(5, SendOpcode::Send, true), &mut out), Err(PostError::QueueFull(4)));
    let read = j.next_send(&mut out).unwrap();
    assert_eq!(out.take(), [('s', 1, 0)], "nothing is before it");
    assert_eq!(
        (read.opcode, read.flags),
        (SendOpcode::Read, SendFlags::SIGNALED),
        "3 waits for its end"
    );
    let read = read.wr_id;
    j.gave_send();
    let write = j.next_send(&mut out).unwrap();
    assert_eq!(write.opcode, SendOpcode::Write);
    let write = write.wr_id;
    j.gave_send();
    assert!(j.next_send(&mut out).is_none());
    assert_eq!(come(&mut j, &mut out, read, 0), [('s', 3, 0)]);
    assert_eq!(come(&mut j, &mut out, write, 0), [('s', 4, 0)]);
    assert_eq!(j.progress(QpState::Rts).completed, 3);
    send(&mut j, &mut out, 6, true);
}

#[test]
fn the_first_error_is_told_once_and_what_had_succeeded_completes() {
    let (mut j, mut out) = (journal(false), Out::default());
    let numbers = [
        send(&mut j, &mut out, 1, false),
        send(&mut j, &mut out, 2, true),
        send(&mut j, &mut out, 3, true),
    ];
    let first = recv(&mut j, &mut out, 7).unwrap();
    let second = recv(&mut j, &mut out, 8).unwrap();
    // The receives are polled first: one message had come before the end.
    assert_eq!(come(&mut j, &mut out, first, 0), [('r', 7, 0)]);
    assert_eq!(come(&mut j, &mut out, second, FLUSH), []);
    assert!(j.is_puzzled() && j.poll_failure(false).is_none());
    assert_eq!(come(&mut j, &mut out, numbers[1], RETRY), [], "1 made no WC");
    assert_eq!(j.poll_failure(false), Some(WcStatus::RetryExcErr));
    assert_eq!((j.poll_failure(true), j.held()), (None, Some(WcStatus::RetryExcErr)));
    assert_eq!(come(&mut j, &mut out, numbers[2], FLUSH), []);
    stop_in_error(&mut j, &mut out);
    assert_eq!(j.stop(0, &mut out), Step::Mark(Queue::Recv));
    j.marked(Queue::Recv);
    assert_eq!(j.stop(0, &mut out), Step::Wait);
    assert_eq!(come(&mut j, &mut out, Slot::Marker(Queue::Send).wr_id(), FLUSH), []);
    assert_eq!(j.stop(0, &mut out), Step::Wait);
    assert_eq!(
        j.post_send(&wr(4, SendOpcode::Write, true), &mut out),
        Ok(Posted::Kept),
        "nothing is refused"
    );
    assert_eq!(come(&mut j, &mut out, Slot::Marker(Queue::Recv).wr_id(), FLUSH), []);
    let Step::Done(backlog) = j.stop(0, &mut out) else { panic!("both markers are out") };
    let sends: Vec<_> = backlog.sends.iter().map(|e| (e.wr_id, e.started)).collect();
    assert_eq!(sends, [(1, true), (2, true), (3, true), (4, false)], "nothing says that 1 ran");
    assert_eq!(backlog.recvs.iter().map(|e| e.wr_id).collect::<Vec<_>>(), [8]);
    assert_eq!((backlog.executed, backlog.exact), (Messages { all: 1, receives: 1 }, false));
    assert_eq!(backlog.completed, Messages::default());
    assert!(j.post_send(&wr(6, SendOpcode::Write, true), &mut out).is_err());
    assert_eq!(
        come(&mut j, &mut out, numbers[1], 0),
        [],
        "what a dying device says later counts for nothing"
    );
}

/// As with rxe, which never completes a receive that is posted to a QP in ERR.
#[test]
fn a_flush_that_stands_still_is_ended_by_destroying_the_qp() {
    let (mut j, mut out) = (journal(false), Out::default());
    let numbers = [1, 2].map(|wr_id| send(&mut j, &mut out, wr_id, true));
    let _taken = recv(&mut j, &mut out, 7).unwrap();
    stop_in_error(&mut j, &mut out);
    assert_eq!(j.stop(0, &mut out), Step::Mark(Queue::Recv));
    j.marked(Queue::Recv);
    assert_eq!(j.stop(1_000, &mut out), Step::Wait);
    assert_eq!(j.stop(15_000, &mut out), Step::Wait);
    // It is slow, and goes on.
    assert_eq!(come(&mut j, &mut out, numbers[0], 0), [('s', 1, 0)]);
    assert_eq!(come(&mut j, &mut out, numbers[1], FLUSH), []);
    assert_eq!(j.stop(21_000, &mut out), Step::Wait);
    assert_eq!(j.stop(40_999, &mut out), Step::Wait);
    assert_eq!(j.stop(41_000, &mut out), Step::Destroy);
    j.provider_gone();
    let Step::Done(backlog) = j.stop(41_000, &mut out) else { panic!("it is stopped") };
    assert_eq!(backlog.sends.iter().map(|e| e.wr_id).collect::<Vec<_>>(), [2]);
    assert_eq!(backlog.recvs.iter().map(|e| e.wr_id).collect::<Vec<_>>(), [7]);
}

/// As with mlx5 over a bond: flushes are missing, at the front, in the middle, or all of them.
#[test]
fn what_is_before_an_error_or_a_marker_is_not_done_by_that() {
    // 2 succeeds. Of 3 (a signalled one) and of 1, which made no WC, the provider says nothing.
    for flushed in [&[][..], &[3], &[2, 3]] {
        let (mut j, mut out) = (journal(false), Out::default());
        let numbers = [1, 2, 3, 4].map(|wr_id| send(&mut j, &mut out, wr_id, wr_id % 2 == 0));
        assert_eq!(come(&mut j, &mut out, numbers[1], 0), [('s', 2, 0)], "1 is done, too");
        for at in flushed {
            assert_eq!(come(&mut j, &mut out, numbers[*at], FLUSH), []);
        }
        stop_in_error(&mut j, &mut out);
        assert_eq!(come(&mut j, &mut out, Slot::Marker(Queue::Send).wr_id(), FLUSH), []);
        j.provider_gone();
        let Step::Done(backlog) = j.stop(0, &mut out) else { panic!("it is stopped") };
        assert_eq!(backlog.sends.iter().map(|e| e.wr_id).collect::<Vec<_>>(), [3, 4]);
        assert_eq!((out.take(), backlog.completed.all), (vec![], 2), "{flushed:?}");
    }
}

/// Whether a QP has ever worked decides what becomes of one that fails on a path that lives.
#[test]
fn sends_before_the_first_error_may_have_run_and_nobody_says_so() {
    for (failing, unknown) in [(0, 0), (2, 2)] {
        let (mut j, mut out) = (journal(false), Out::default());
        let numbers = [1, 2, 3].map(|wr_id| send(&mut j, &mut out, wr_id, wr_id == 3));
        let counts = |j: &Journal| {
            let p = j.progress(QpState::Rts);
            (p.outstanding_sends, p.unannounced_sends)
        };
        assert_eq!(counts(&j), (3, 0));
        come(&mut j, &mut out, numbers[failing], RETRY);
        assert_eq!(counts(&j), (3 - unknown, unknown));
    }
}

/// Where the program has ended its QP, it gets no success that nobody has seen.
#[test]
fn what_an_ended_qp_has_lost_is_flushed_if_it_was_to_be_told() {
    let (mut j, mut out) = (journal(false), Out::default());
    let numbers = [1, 2, 3].map(|wr_id| send(&mut j, &mut out, wr_id, wr_id != 1));
    j.end(&mut out);
    assert_eq!(come(&mut j, &mut out, numbers[2], FLUSH), [('s', 2, FLUSH), ('s', 3, FLUSH)]);
    assert!(j.is_empty());
}

#[test]
fn a_provider_that_refuses_err_or_markers_is_not_asked_for_ever() {
    for takes_err in [false, true] {
        let (mut j, mut out) = (journal(false), Out::default());
        send(&mut j, &mut out, 1, true);
        assert_eq!(j.stop(0, &mut out), Step::ToErr);
        if takes_err {
            j.in_error();
            assert_eq!(j.stop(0, &mut out), Step::Mark(Queue::Send));
            j.marked(Queue::Send);
            j.unmarked(Queue::Send);
            assert_eq!(j.stop(19_999, &mut out), Step::Mark(Queue::Send));
        }
        assert_eq!(j.stop(20_000, &mut out), Step::Destroy);
        j.provider_gone();
        assert!(matches!(j.stop(20_000, &mut out), Step::Done(b) if b.sends.len() == 1));
    }
}

#[test]
fn an_error_of_the_applications_own_goes_through_even_where_a_flush_was_seen_first() {
    let (mut j, mut out) = (journal(false), Out::default());
    let numbers = [send(&mut j, &mut out, 1, true), send(&mut j, &mut out, 2, false)];
    let number = recv(&mut j, &mut out, 7).unwrap();
    assert_eq!(come(&mut j, &mut out, number, FLUSH), []);
    assert_eq!(come(&mut j, &mut out, numbers[0], ACCESS), [('r', 7, FLUSH), ('s', 1, ACCESS)]);
    assert!(j.ended());
    // What is posted now flushes in its turn.
    let third = send(&mut j, &mut out, 3, false);
    assert_eq!(out.take(), []);
    assert_eq!(come(&mut j, &mut out, numbers[1], FLUSH), [('s', 2, FLUSH)]);
    assert_eq!(come(&mut j, &mut out, third, FLUSH), [('s', 3, FLUSH)]);
    assert_eq!(recv(&mut j, &mut out, 8), None);
    assert_eq!(out.take(), [('r', 8, FLUSH)]);
    assert_eq!(j.poll_failure(true), None);
    j.provider_gone();
    assert_eq!(j.stop(0, &mut out), Step::Ended);
}

#[test]
fn an_application_that_goes_to_err_gets_its_flushes_also_from_a_device_that_is_gone() {
    let (mut j, mut out) = (journal(false), Out::default());
    let number = send(&mut j, &mut out, 1, false);
    send(&mut j, &mut out, 2, true);
    j.end(&mut out);
    assert_eq!(come(&mut j, &mut out, number, FLUSH), [('s', 1, FLUSH)]);
    j.provider_gone();
    assert!(matches!(j.stop(0, &mut out), Step::Done(b) if b.sends.is_empty()));
    assert_eq!(out.take(), [('s', 2, FLUSH)]);
}

#[test]
fn a_qp_that_is_given_up_completes_at_once_with_the_original_error() {
    let (mut j, mut out) = (journal(false), Out::default());
    let number = send(&mut j, &mut out, 1, false);
    send(&mut j, &mut out, 2, true);
    recv(&mut j, &mut out, 7);
    assert_eq!(j.stop(0, &mut out), Step::ToErr);
    j.fail(WcStatus::RetryExcErr, &mut out);
    assert_eq!(out.take(), [('s', 1, RETRY), ('s', 2, FLUSH), ('r', 7, FLUSH)]);
    assert_eq!(come(&mut j, &mut out, number, 0), []);
    assert_eq!(j.post_send(&wr(3, SendOpcode::Write, true), &mut out), Ok(Posted::Kept));
    assert_eq!(out.take(), [('s', 3, FLUSH)]);
    assert!(matches!(j.stop(0, &mut out), Step::Done(b) if b == Backlog::default()));
}

/// ... unless it has ended before: then the application has its error, or wanted none.
#[test]
fn a_qp_that_has_ended_is_flushed_when_it_is_given_up() {
    for by_error in [true, false] {
        let (mut j, mut out) = (journal(false), Out::default());
        let number = send(&mut j, &mut out, 1, true);
        send(&mut j, &mut out, 2, true);
        if by_error {
            assert_eq!(come(&mut j, &mut out, number, ACCESS), [('s', 1, ACCESS)]);
        } else {
            j.end(&mut out);
            assert_eq!(come(&mut j, &mut out, number, FLUSH), [('s', 1, FLUSH)]);
        }
        j.fail(WcStatus::RetryExcErr, &mut out);
        assert_eq!(out.take(), [('s', 2, FLUSH)]);
    }
}

#[test]
fn with_a_shared_queue_the_device_says_when_the_last_receive_was_taken() {
    let (mut j, mut out) = (journal(true), Out::default());
    assert_eq!(j.post_recv(&RecvWr { wr_id: 1, sges: &[] }, &mut out), Err(PostError::HasSrq));
    j.handle_shared_recv(3);
    stop_in_error(&mut j, &mut out);
    assert_eq!(j.stop(0, &mut out), Step::Wait);
    come(&mut j, &mut out, Slot::Marker(Queue::Send).wr_id(), FLUSH);
    j.recvs_polled();
    assert_eq!(j.stop(0, &mut out), Step::Wait, "an empty CQ says nothing before the event");
    j.handle_last_wqe();
    assert!(
        !j.handle_shared_recv_error(&Wc { status: FLUSH, ..Wc::default() }, &mut out),
        "it goes back"
    );
    j.handle_shared_recv(4);
    assert!(j.wants_recvs_polled());
    j.recvs_polled();
    let Step::Done(backlog) = j.stop(0, &mut out) else { panic!("both queues are through") };
    assert_eq!(backlog.executed.receives, 2);
    assert_eq!(j.progress(QpState::Rts).first_moved_us, None, "a new life would begin here");
}

#[test]
fn a_shared_receive_that_was_too_small_ends_the_qp() {
    let (mut j, mut out) = (journal(true), Out::default());
    let number = send(&mut j, &mut out, 1, true);
    let wc = Wc { status: WcStatus::LocLenErr as u32, ..Wc::default() };
    assert!(j.handle_shared_recv_error(&wc, &mut out) && j.ended());
    assert_eq!(come(&mut j, &mut out, number, FLUSH), [('s', 1, FLUSH)]);
}

#[test]
fn a_provider_that_says_what_cannot_be_is_not_believed() {
    let (mut j, mut out) = (journal(false), Out::default());
    let number = send(&mut j, &mut out, 1, true);
    assert_eq!(come(&mut j, &mut out, number + 1, 0), []);
    assert_eq!(j.poll_failure(false), Some(WcStatus::FatalErr));
    j.provider_gone();
    assert_eq!(j.stop(0, &mut out), Step::Strange);
    j.fail(WcStatus::FatalErr, &mut out);
    assert_eq!(out.take(), [('s', 1, WcStatus::FatalErr as u32)]);
}

#[test]
fn a_reset_forgets_all_and_late_completions_belong_to_nothing() {
    let (mut j, mut out) = (journal(false), Out::default());
    let old = send(&mut j, &mut out, 1, true);
    let old_recv = recv(&mut j, &mut out, 7).unwrap();
    assert!(come(&mut j, &mut out, old, ACCESS).len() == 1 && j.ended());
    j.reset();
    assert!(!j.ended() && j.is_empty());
    assert_eq!(
        j.post_send(&wr(2, SendOpcode::Write, true), &mut out),
        Ok(Posted::Kept),
        "not in RTS again yet"
    );
    j.open();
    j.start();
    let fresh = j.next_send(&mut out).unwrap().wr_id;
    j.gave_send();
    assert_eq!(come(&mut j, &mut out, old_recv, FLUSH), []);
    assert_eq!(come(&mut j, &mut out, old, FLUSH), []);
    assert_eq!(come(&mut j, &mut out, fresh, 0), [('s', 2, 0)]);
}

#[test]
fn a_tail_without_wcs_is_not_waited_for_and_a_send_that_needs_a_receive_may_wait() {
    let (mut j, mut out) = (journal(false), Out::default());
    let first = send(&mut j, &mut out, 1, true);
    assert_eq!(
        (j.progress(QpState::Rts).outstanding_sends, j.progress(QpState::Rts).waiting_rnr),
        (1, true)
    );
    j.post_send(&wr(2, SendOpcode::Write, false), &mut out).unwrap();
    assert_eq!(come(&mut j, &mut out, first, 0), [('s', 1, 0)]);
    let progress = j.progress(QpState::Rts);
    assert_eq!((progress.outstanding_sends, progress.waiting_rnr), (0, false));
    assert_eq!((progress.advanced, progress.completed, progress.first_moved_us), (1, 1, Some(5)));
    j.refused_sends(1);
    assert!(j.is_empty());
}

struct Batch(Vec<SendWr<'static>>);

impl SendBatch for Batch {
    fn count(&self) -> usize {
        self.0.len()
    }
    fn wr(&self, index: usize) -> SendWr<'_> {
        self.0[index]
    }
}

#[test]
fn a_batch_is_taken_whole_or_not_at_all() {
    let (mut j, mut out) = (journal(false), Out::default());
    let first = send(&mut j, &mut out, 1, true);
    let batch = |n: u64| Batch((2..2 + n).map(|i| wr(i, SendOpcode::Send, i == 1 + n)).collect());
    assert_eq!(j.post_sends(&batch(4), &mut out), Err(PostError::QueueFull(1)));
    assert_eq!(j.post_sends(&batch(3), &mut out), Ok(Posted::Give(first + 1)));
    assert_eq!(come(&mut j, &mut out, first + 3, 0), [('s', 1, 0), ('s', 4, 0)]);
    assert_eq!(j.progress(QpState::Rts).completed, 4);
    let mut bad = batch(2);
    bad.0[1].inline_data = Some(b"no flag");
    assert!(j.post_sends(&bad, &mut out).is_err());
    assert_eq!(
        (
            j.is_empty(),
            j.progress(QpState::Rts).outstanding_sends,
            j.progress(QpState::Rts).waiting_rnr
        ),
        (true, 0, false)
    );
    j.handle_fatal();
    assert_eq!((j.held(), j.poll_failure(true)), (Some(WcStatus::FatalErr), None));
}

/// A send without a sign has succeeded, and nobody says so: what the peer's wrong request flushes
/// is behind it.
#[test]
fn a_qp_that_has_ended_flushes_what_is_behind_a_silent_success() {
    let (mut j, mut out) = (journal(false), Out::default());
    send(&mut j, &mut out, 1, false);
    j.handle_own_error(&mut out);
    let number = send(&mut j, &mut out, 2, true);
    assert_eq!(come(&mut j, &mut out, number, FLUSH), [('s', 2, FLUSH)]);
    // What was kept, too: the network had seemed to fail before the event said why.
    let (mut j, mut out) = (journal(false), Out::default());
    send(&mut j, &mut out, 1, false);
    let number = recv(&mut j, &mut out, 7).unwrap();
    assert_eq!(come(&mut j, &mut out, number, FLUSH), []);
    assert_eq!(j.post_send(&wr(2, SendOpcode::Write, true), &mut out), Ok(Posted::Kept));
    assert!(j.next_send(&mut out).is_none(), "held");
    j.handle_own_error(&mut out);
    assert_eq!(out.take(), [('r', 7, FLUSH)]);
    let number = j.next_send(&mut out).map(|wr| wr.wr_id).expect("the provider flushes it");
    j.gave_send();
    assert_eq!(come(&mut j, &mut out, number, FLUSH), [('s', 2, FLUSH)]);
}

/// The same where the markers are out already, and where nobody asks on.
#[test]
fn a_marker_flushes_what_waits_where_the_qp_has_ended() {
    let (mut j, mut out) = (journal(true), Out::default());
    send(&mut j, &mut out, 1, false);
    stop_in_error(&mut j, &mut out);
    assert_eq!(j.post_send(&wr(2, SendOpcode::Write, true), &mut out), Ok(Posted::Kept));
    j.handle_own_error(&mut out);
    assert_eq!(out.take(), []);
    assert_eq!(come(&mut j, &mut out, Slot::Marker(Queue::Send).wr_id(), FLUSH), [('s', 2, FLUSH)]);
    j.handle_last_wqe();
    j.recvs_polled();
    assert_eq!(j.stop(0, &mut out), Step::Ended);
    assert_eq!(
        j.post_send(&wr(3, SendOpcode::Write, true), &mut out),
        Ok(Posted::Kept),
        "as a QP in ERR takes it"
    );
    assert_eq!(out.take(), [('s', 3, FLUSH)]);
}

fn in_place(j: &mut Journal, wr_id: u64, status: u32) -> Option<(u64, u32)> {
    let mut wc = Wc { wr_id, status, ..Wc::default() };
    j.complete_usual(&mut wc).then_some((wc.wr_id, wc.qp_num))
}

#[test]
fn a_success_completes_in_place_where_nothing_is_unusual() {
    let (mut j, mut out) = (journal(false), Out::default());
    let first = send(&mut j, &mut out, 10, true);
    assert_eq!(in_place(&mut j, first, 0), None, "when the first moved is noted");
    assert_eq!(come(&mut j, &mut out, first, 0), [('s', 10, 0)]);
    let (silent, told) = (send(&mut j, &mut out, 11, false), send(&mut j, &mut out, 12, true));
    assert_eq!(in_place(&mut j, silent, 0), None, "nothing is to be told of it");
    assert_eq!(in_place(&mut j, told, RETRY), None, "an error");
    assert_eq!(in_place(&mut j, told + 1, 0), None, "nothing is there");
    assert_eq!(in_place(&mut j, told, 0), Some((12, 9)));
    assert_eq!(in_place(&mut j, told, 0), None, "twice");
    let progress = j.progress(QpState::Rts);
    assert_eq!((progress.completed, progress.advanced), (3, 2));

    let two = [13, 14].map(|wr_id| send(&mut j, &mut out, wr_id, true));
    assert_eq!(in_place(&mut j, two[1], 0), None, "the one before is to be told of, too");
    assert_eq!(come(&mut j, &mut out, two[1], 0), [('s', 13, 0), ('s', 14, 0)]);

    let recvs = [20, 21].map(|wr_id| recv(&mut j, &mut out, wr_id).unwrap());
    assert_eq!(in_place(&mut j, recvs[1], 0), None, "not in its turn");
    assert_eq!(in_place(&mut j, recvs[0], 0), Some((20, 9)));
    assert_eq!(j.progress(QpState::Rts).executed, 1);

    let last = send(&mut j, &mut out, 15, true);
    let mut stopping = j.clone();
    stop_in_error(&mut stopping, &mut out);
    assert_eq!(in_place(&mut stopping, last, 0), None, "it is being stopped");
    j.forget();
    assert_eq!(in_place(&mut j, last, 0), None, "it is for nobody");
    assert!(out.take().is_empty());
}

#[test]
fn rows_that_are_written_ahead_are_sends_like_others() {
    use unbroken_journal::{Marks, SendRow};
    let (mut j, mut out) = (journal(false), Out::default());
    assert_eq!(j.usual_room(), CAPS.max_send_wr);
    let wrs = [(30, SendOpcode::Send, false), (31, SendOpcode::Write, true)]
        .map(|(wr_id, opcode, signaled)| wr(wr_id, opcode, signaled));
    for (ahead, wr) in (0..).zip(&wrs) {
        let (row, number) = j.row_ahead(ahead);
        row.write(wr, Sge { addr: 1, length: 2, lkey: 3 }, Marks::USUAL);
        assert_eq!(Slot::parse(number), Some(Slot::Entry(Queue::Send, ahead.into())));
    }
    assert_eq!(j.progress(QpState::Rts).sends(), 0, "nobody has counted them yet");
    j.wrote_rows(2, 1, 2);
    assert_eq!(j.usual_room(), CAPS.max_send_wr - 2);
    assert!(j.inline_ahead(0, 4).is_none(), "none has had inline data yet");
    let progress = j.progress(QpState::Rts);
    assert_eq!((progress.outstanding_sends, progress.waiting_rnr), (2, true));
    assert_eq!(come(&mut j, &mut out, 1, 0), [('s', 31, 0)]);
    send(&mut j, &mut out, 32, true);
    j.refused_sends(1);
    stop_in_error(&mut j, &mut out);
    assert_eq!(j.usual_room(), 0);
}
