//! Connections between the processes of a run, with rank 0 in the middle.
//!
//! All ranks make the same calls in the same order. A message is: u32 how many came before it, u8 what it belongs to, u64 bytes,
//! then these; a rank that is at another call than the others is found by the first two. Values are reduced on rank 0, in
//! the order of the ranks, so that a result does not depend on which message came first.
//!
//! An error on any rank ends the run on all: rank 0 tells the others, and says so. A thread for each connection reads what comes,
//! so that a rank that is lost is noticed while the loop does something else; see [`watchdog`](super::watchdog).

use super::fault::{self, Fault};
use super::watchdog::{Device, Progress, Watch, lock};
use anyhow::bail;
use cuda_std::{Element, bf16};
use engine::Result;
use engine::tensor::DType;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::AddAssign;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    Sum,
    /// Sum over ranks divided by their number.
    Mean,
}

/// What a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Gather,
    Tell,
    Reduce,
    /// The run ends, and would end so again.
    Failed,
    /// The run ends; it could go on from its last checkpoint.
    Lost,
    /// The rank lives; what it brings is no part of a call.
    Beat,
    /// The rank goes, because the run has ended for it.
    Farewell,
}

impl Call {
    const ALL: [Self; 7] =
        [Self::Gather, Self::Tell, Self::Reduce, Self::Failed, Self::Lost, Self::Beat, Self::Farewell];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    fn of_end(lost: bool) -> Self {
        if lost { Self::Lost } else { Self::Failed }
    }

    /// Whether the run is lost, if this says that it ends.
    fn end(self) -> Option<bool> {
        match self {
            Self::Failed => Some(false),
            Self::Lost => Some(true),
            _ => None,
        }
    }
}

const HEADER_BYTES: usize = 13;

/// Of a blob or of a text.
const MOST_BYTES: usize = 64 << 20;

/// Values are reduced in pieces, so that rank 0 need not hold every rank's at once.
const PIECE_BYTES: usize = 4 << 20;

/// How often one that waits looks whether the run has ended.
const LOOK: Duration = Duration::from_millis(100);

/// How long a rank that has failed waits for rank 0 to say so, and rank 0 for the others to have heard it.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// One rank's end.
#[derive(Debug)]
pub struct Star {
    pub rank: usize,
    pub ranks: usize,
    /// On rank 0 one to each other rank, in order; else the one to rank 0.
    links: Vec<Open>,
    calls: u32,
    /// Rank 0 has said why it ends.
    told: bool,
    patience: Duration,
    /// What the run is doing: `step 17`.
    stage: String,
    watch: Arc<Watch>,
}

/// A connection to another rank, made.
#[derive(Debug)]
pub struct Link {
    /// `rank 2 (node7, process 4711)`
    pub who: String,
    pub stream: TcpStream,
}

/// A connection in use: a thread reads from it.
#[derive(Debug)]
struct Open {
    who: String,
    /// For the loop, and for the watchdog.
    out: Arc<Mutex<TcpStream>>,
    inbox: Receiver<io::Result<Message>>,
}

/// How many calls came before, what it belongs to, if it is of this program, and its bytes.
type Message = (u32, Option<Call>, Vec<u8>);

impl Star {
    /// From connections that are made: rank 0's to ranks 1, 2, …, or another rank's to rank 0. A rank from which nothing comes
    /// in a call for as long as `patience`, or which makes no call for so long, is given up.
    pub fn new(rank: usize, ranks: usize, links: Vec<Link>, patience: Duration) -> Result<Self> {
        assert_eq!(links.len(), if rank == 0 { ranks - 1 } else { 1 }, "rank 0 in the middle");
        let watch = Arc::new(Watch::new(links.iter().map(|link| &*link.who), patience));
        let open = |(i, link)| Open::new(link, rank == 0, i + 1, &watch, patience);
        let links = links.into_iter().enumerate().map(open).collect::<Result<_>>()?;
        let stage = watch.progress().during;
        Ok(Self { rank, ranks, links, calls: 0, told: false, patience, stage, watch })
    }

    /// Until [`begin`](Self::begin), a rank that makes no call for as long as `patience` is given up.
    pub fn begins_within(&self, patience: Duration) {
        self.watch.set_patience(patience);
    }

    /// The first step begins.
    pub fn begin(&self) {
        self.watch.set_patience(self.patience);
    }

    /// Has the watchdog look after these collectives.
    pub fn watch_device(&self, device: Arc<dyn Device>) {
        self.watch.set_device(device);
    }

    /// From here on this process ends, whatever it waits for, when a rank is lost.
    pub fn watch(self) -> Result<Self> {
        let outs: Vec<_> = self.links.iter().map(|link| Arc::clone(&link.out)).collect();
        let others = outs.clone();
        let beat = move |progress: &Progress| {
            for out in &outs {
                // Who is sending something else is heard anyway.
                if let Ok(mut out) = out.try_lock() {
                    let _ = write(&mut out, 0, Call::Beat, &progress.to_bytes());
                }
            }
        };
        let middle = self.rank == 0;
        let tell = move |fault: &Fault| {
            // What has failed on this rank's device only this rank knows.
            for out in others.iter().filter(|_| middle || matches!(fault, Fault::Device { .. })) {
                // One that is lost may hold what is sent to it for ever.
                if let Ok(mut out) = out.try_lock() {
                    let call = Call::of_end(fault.is_loss());
                    let _ = write(&mut out, 0, call, fault.to_string().as_bytes());
                }
            }
        };
        self.watch.start(beat, tell)?;
        Ok(self)
    }

    /// The ends of `ranks` ranks that are threads of this process.
    pub fn in_process(ranks: usize, patience: Duration) -> Result<Vec<Self>> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (mut middle, mut ends) = (Vec::new(), Vec::new());
        for rank in 1..ranks {
            let stream = TcpStream::connect(listener.local_addr()?)?;
            ends.push(Self::new(rank, ranks, vec![Link { who: "rank 0".to_owned(), stream }], patience)?);
            middle.push(Link { who: format!("rank {rank}"), stream: listener.accept()?.0 });
        }
        ends.insert(0, Self::new(0, ranks, middle, patience)?);
        Ok(ends)
    }

    /// Says what the run is doing, for messages: `step 17`.
    pub fn note(&mut self, during: impl Into<String>) {
        self.stage = during.into();
        self.watch.note(Progress { calls: self.calls.into(), during: self.stage.clone() });
    }

    /// Says which operation of that comes now.
    pub fn doing(&mut self, operation: &str) {
        let during = format!("{}, {operation}", self.stage);
        self.watch.note(Progress { calls: self.calls.into(), during });
    }

    /// What the run is doing.
    pub fn stage(&self) -> &str {
        &self.stage
    }

    /// That and the operation.
    pub fn during(&self) -> String {
        self.watch.progress().during
    }

    /// The run has ended in order: this rank goes, and the others may. No calls come after this.
    pub fn end(&self) {
        self.watch.is_over();
        for Open { out, .. } in &self.links {
            let _ = write(&mut lock(out), self.calls, Call::Farewell, &[]);
        }
    }

    /// What a rank is called.
    pub fn who(&self, rank: usize) -> String {
        let link = if self.rank == 0 { rank.checked_sub(1) } else { (rank == 0).then_some(0) };
        link.and_then(|link| self.links.get(link)).map_or_else(|| format!("rank {rank}"), |link| link.who.clone())
    }

    /// Every rank's bytes, in order, on rank 0; nothing on the others.
    pub fn gather(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.together(|star| {
            if star.rank > 0 {
                star.send(0, Call::Gather, bytes)?;
                return Ok(Vec::new());
            }
            let mut all = vec![bytes.to_vec()];
            for link in 0..star.links.len() {
                all.push(star.receive(link, Call::Gather, None)?);
            }
            Ok(all)
        })
    }

    /// Rank 0's bytes, on all ranks.
    pub fn tell(&mut self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.together(|star| {
            if star.rank > 0 {
                return star.receive(0, Call::Tell, None);
            }
            for link in 0..star.links.len() {
                star.send(link, Call::Tell, &bytes)?;
            }
            Ok(bytes)
        })
    }

    /// Whether it is so on any rank.
    pub fn any(&mut self, here: bool) -> Result<bool> {
        let mut values = [f64::from(u8::from(here))];
        self.sum(&mut values)?;
        Ok(values[0] > 0.0)
    }

    /// Sums over the ranks, on all ranks.
    pub fn sum(&mut self, values: &mut [f64]) -> Result<()> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        let widen = |bytes: &[u8]| Ok(words::<f64>(bytes));
        self.together(|star| star.reduce(bytes, widen, |total| bytemuck::cast_slice(total).to_vec()))
    }

    /// `bytes` = reduction of every rank's, values of type `dtype`, summed in f32. All ranks get the same bits.
    pub fn reduce_bytes(&mut self, bytes: &mut [u8], dtype: DType, reduction: Reduction) -> Result<()> {
        let scale = match reduction {
            Reduction::Sum => 1.0,
            Reduction::Mean => 1.0 / self.ranks as f32,
        };
        let narrow = |total: &mut [f32]| {
            for value in total.iter_mut() {
                *value *= scale;
            }
            narrowed(total, dtype)
        };
        self.together(|star| {
            let widen = |bytes: &[u8]| widened(bytes, dtype);
            bytes.chunks_mut(PIECE_BYTES).try_for_each(|piece| star.reduce(piece, widen, narrow))
        })
    }

    /// Adds up values of type `T` on rank 0 and sends what `narrow` makes of them to all.
    fn reduce<T: AddAssign>(
        &mut self,
        bytes: &mut [u8],
        widen: impl Fn(&[u8]) -> Result<Vec<T>>,
        narrow: impl Fn(&mut [T]) -> Vec<u8>,
    ) -> Result<()> {
        if self.rank > 0 {
            self.send(0, Call::Reduce, bytes)?;
            bytes.copy_from_slice(&self.receive(0, Call::Reduce, Some(bytes.len()))?);
            return Ok(());
        }
        let mut total = widen(bytes)?;
        for link in 0..self.links.len() {
            let more = widen(&self.receive(link, Call::Reduce, Some(bytes.len()))?)?;
            total.iter_mut().zip(more).for_each(|(total, more)| *total += more);
        }
        bytes.copy_from_slice(&narrow(&mut total));
        (0..self.links.len()).try_for_each(|link| self.send(link, Call::Reduce, bytes))
    }

    /// `bytes` = rank 0's.
    pub fn broadcast_bytes(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.together(|star| {
            for piece in bytes.chunks_mut(PIECE_BYTES) {
                if star.rank == 0 {
                    (0..star.links.len()).try_for_each(|link| star.send(link, Call::Tell, piece))?;
                } else {
                    piece.copy_from_slice(&star.receive(0, Call::Tell, Some(piece.len()))?);
                }
            }
            Ok(())
        })
    }

    /// Every rank's bytes, of which each has as many, one after another.
    pub fn all_gather_bytes(&mut self, bytes: &[u8]) -> Result<Vec<u8>> {
        let mut all = vec![0; self.ranks * bytes.len()];
        self.together(|star| {
            let most = (PIECE_BYTES / star.ranks).max(1);
            for (i, piece) in bytes.chunks(most).enumerate() {
                let pieces = star.all_gather_piece(piece)?;
                for (rank, piece) in pieces.chunks_exact(piece.len()).enumerate() {
                    all[rank * bytes.len() + i * most..][..piece.len()].copy_from_slice(piece);
                }
            }
            Ok(())
        })?;
        Ok(all)
    }

    fn all_gather_piece(&mut self, piece: &[u8]) -> Result<Vec<u8>> {
        if self.rank > 0 {
            self.send(0, Call::Gather, piece)?;
            return self.receive(0, Call::Gather, Some(self.ranks * piece.len()));
        }
        let mut pieces = piece.to_vec();
        for link in 0..self.links.len() {
            pieces.extend(self.receive(link, Call::Gather, Some(piece.len()))?);
        }
        (0..self.links.len()).try_for_each(|link| self.send(link, Call::Gather, &pieces))?;
        Ok(pieces)
    }

    /// A call of all ranks. What fails in it, rank 0 tells the others.
    fn together<R>(&mut self, call: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        let outcome = self.check().and_then(|()| call(self));
        self.calls = self.calls.wrapping_add(1);
        self.watch.note(Progress { calls: self.calls.into(), during: self.during() });
        if let Err(error) = &outcome
            && self.rank == 0
        {
            self.tell_of(&format!("{error:#}"), fault::is_loss(error));
        }
        outcome
    }

    /// What the watchdog has found.
    pub fn check(&self) -> Result<()> {
        self.watch.verdict().map_or(Ok(()), |fault| Err(fault.into()))
    }

    /// Ends the run on all ranks because of an error on this one. Where rank 0 has taken it on to tell of it, what comes back
    /// is [`Fault::Told`].
    pub fn give_up(&mut self, error: anyhow::Error) -> anyhow::Error {
        let (text, lost) = (format!("{error:#}"), fault::is_loss(&error));
        if self.rank == 0 {
            self.tell_of(&text, lost);
            return error;
        }
        let known = matches!(error.downcast_ref(), Some(Fault::Told { .. } | Fault::Gone { .. }));
        if known || self.send(0, Call::of_end(lost), text.as_bytes()).is_err() {
            return error;
        }
        let Some(link) = self.links.first() else { return error };
        // Rank 0 may have answered something else before it read this.
        while let Ok(Ok((_, call, told))) = link.inbox.recv_timeout(LAST_WORDS) {
            if let Some(lost) = call.and_then(Call::end) {
                return failure("", false, &told, lost).into();
            }
        }
        error
    }

    /// Rank 0 says, once, why it ends; those who do not hear it any more find out in another way.
    fn tell_of(&mut self, text: &str, lost: bool) {
        if !std::mem::replace(&mut self.told, true) {
            for link in 0..self.links.len() {
                let _ = self.send(link, Call::of_end(lost), text.as_bytes());
            }
            // A connection that is closed before the other end has read it may take the message with it.
            let deadline = Instant::now() + LAST_WORDS;
            for Open { out, inbox, .. } in &self.links {
                let _ = lock(out).shutdown(Shutdown::Write);
                while let Ok(Ok(_)) = inbox.recv_timeout(deadline.saturating_duration_since(Instant::now())) {}
            }
        }
    }

    fn send(&mut self, link: usize, call: Call, bytes: &[u8]) -> Result<()> {
        let Open { who, out, inbox } = &self.links[link];
        let sent = write(&mut lock(out), self.calls, call, bytes);
        match sent {
            Ok(()) => Ok(()),
            // It may have said why, before it closed the connection.
            Err(error) => match inbox.recv_timeout(LAST_WORDS) {
                Ok(Ok((_, Some(call @ (Call::Failed | Call::Lost)), text))) => {
                    Err(failure(who, self.rank == 0, &text, call == Call::Lost).into())
                }
                _ => Err(self.lost(who.clone(), &error)),
            },
        }
    }

    /// A message of `call`, of `bytes` bytes if that is known.
    fn receive(&mut self, link: usize, call: Call, bytes: Option<usize>) -> Result<Vec<u8>> {
        let Open { who, inbox, .. } = &self.links[link];
        let begun = Instant::now();
        let message = loop {
            match inbox.recv_timeout(LOOK) {
                Ok(message) => break message,
                Err(RecvTimeoutError::Disconnected) => break Err(io::ErrorKind::ConnectionAborted.into()),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some(fault) = self.watch.verdict() {
                return Err(fault.into());
            }
            if begun.elapsed() >= self.patience {
                break Err(io::ErrorKind::TimedOut.into());
            }
        };
        let (number, found, message) = message.map_err(|error| self.lost(who.clone(), &error))?;
        if let Some(lost) = found.and_then(Call::end) {
            return Err(failure(who, self.rank == 0, &message, lost).into());
        }
        if (number, found) != (self.calls, Some(call)) || bytes.is_some_and(|bytes| bytes != message.len()) {
            let tell = |number: u32, call: &dyn fmt::Debug, bytes: usize| format!("{call:?} {number} of {bytes} bytes");
            let expected = tell(self.calls, &call, bytes.unwrap_or(message.len()));
            let found = found.map_or("no message of this program".into(), |found| tell(number, &found, message.len()));
            bail!(Fault::OutOfStep { who: who.clone(), expected, found });
        }
        Ok(message)
    }

    fn lost(&self, who: String, error: &io::Error) -> anyhow::Error {
        let during = self.during();
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                Fault::Silent { who, waited: self.patience, during }.into()
            }
            _ => Fault::Gone { who, during }.into(),
        }
    }
}

impl Drop for Star {
    fn drop(&mut self) {
        self.watch.is_over();
        for Open { out, .. } in &self.links {
            // The thread that reads has the connection, too: it would stay open.
            let _ = lock(out).shutdown(Shutdown::Both);
        }
    }
}

impl Open {
    /// `i` is the rank's number for the watchdog; `middle`, whether this is rank 0.
    fn new(link: Link, middle: bool, i: usize, watch: &Arc<Watch>, patience: Duration) -> Result<Self> {
        let Link { who, stream } = link;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(patience))?;
        let (to_loop, inbox) = channel();
        let mut reading = stream.try_clone()?;
        let watch = Arc::downgrade(watch);
        let from = who.clone();
        let run = move || {
            loop {
                let message = read(&mut reading);
                let Some(watch) = watch.upgrade() else { return };
                match &message {
                    Ok((_, Some(Call::Beat), progress)) => {
                        watch.heard(i, Progress::of_bytes(progress));
                        continue;
                    }
                    Ok((_, Some(Call::Farewell), _)) => {
                        watch.leaves(i);
                        continue;
                    }
                    Ok((_, Some(call @ (Call::Failed | Call::Lost)), text)) => {
                        watch.decide(failure(&from, middle, text, *call == Call::Lost));
                    }
                    Ok(_) => watch.heard(i, None),
                    Err(_) => watch.gone(i),
                }
                let ended = message.is_err();
                if to_loop.send(message).is_err() || ended {
                    return;
                }
            }
        };
        thread::Builder::new().name(format!("from {who}")).spawn(run)?;
        Ok(Self { who, out: Arc::new(Mutex::new(stream)), inbox })
    }
}

/// What a rank's last words mean here.
fn failure(who: &str, middle: bool, text: &[u8], lost: bool) -> Fault {
    let text = String::from_utf8_lossy(text).into_owned();
    if middle { Fault::Failed { who: who.to_owned(), text, lost } } else { Fault::Told { text, lost } }
}

fn write(stream: &mut TcpStream, number: u32, call: Call, bytes: &[u8]) -> io::Result<()> {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&number.to_le_bytes());
    header[4] = call as u8;
    header[5..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    stream.write_all(&header)?;
    stream.write_all(bytes)
}

fn read(stream: &mut TcpStream) -> io::Result<Message> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let [a, b, c, d, call, bytes @ ..] = header;
    let len = usize::try_from(u64::from_le_bytes(bytes)).ok().filter(|&len| len <= MOST_BYTES);
    let len = len.ok_or_else(|| io::Error::other("a message longer than any"))?;
    let mut message = vec![0; len];
    stream.read_exact(&mut message)?;
    Ok((u32::from_le_bytes([a, b, c, d]), Call::of(call), message))
}

/// Values whose bytes lie anywhere.
fn words<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

fn widened(bytes: &[u8], dtype: DType) -> Result<Vec<f32>> {
    match dtype {
        DType::F32 => Ok(words(bytes)),
        DType::Bf16 => Ok(words::<bf16>(bytes).into_iter().map(bf16::to_f32).collect()),
        DType::I32 => bail!("floats can be reduced over ranks, the tensor is i32"),
    }
}

fn narrowed(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::Bf16 => {
            let values: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
            bytemuck::cast_slice(&values).to_vec()
        }
        _ => bytemuck::cast_slice(values).to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Runs `rank` on a thread for each of `ranks`.
    fn on_ranks<R: Send>(ranks: usize, patience: Duration, rank: impl Fn(&mut Star) -> R + Sync) -> Vec<R> {
        let rank = &rank;
        thread::scope(|scope| {
            let stars = Star::in_process(ranks, patience).unwrap();
            let threads: Vec<_> = stars.into_iter().map(|mut star| scope.spawn(move || rank(&mut star))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn reductions_are_the_same_bits_everywhere_and_in_the_order_of_the_ranks() {
        // Longer than a piece, and values whose sum depends on the order.
        let value = |rank: usize, i: usize| [1e8f32, 3.0, -1e8, 0.1][rank] + i as f32 * 1e-3;
        let n = PIECE_BYTES / 4 + 100;
        let sums = on_ranks(4, PATIENCE, |star| {
            let mut values: Vec<f32> = (0..n).map(|i| value(star.rank, i)).collect();
            star.reduce_bytes(bytemuck::cast_slice_mut(&mut values), DType::F32, Reduction::Sum).unwrap();
            values
        });
        let expected: Vec<f32> = (0..n).map(|i| (0..4).map(|rank| value(rank, i)).fold(0.0, |a, b| a + b)).collect();
        assert!(sums.iter().all(|sum| *sum == expected));
        let means = on_ranks(3, PATIENCE, |star| {
            let mut values = [1.0, 2.5, 256.0].map(|x| bf16::from_f32(x + star.rank as f32));
            star.reduce_bytes(bytemuck::cast_slice_mut(&mut values), DType::Bf16, Reduction::Mean).unwrap();
            values.map(bf16::to_f32)
        });
        // 257 lies between two bf16 and rounds to the even one, but only once.
        assert_eq!(means, [[2.0, 3.5, 256.0]; 3]);
        let ints = on_ranks(2, PATIENCE, |star| star.reduce_bytes(&mut [0; 4], DType::I32, Reduction::Sum).is_err());
        assert_eq!(ints, [true, true]);
    }

    #[test]
    fn blobs_numbers_and_flags_travel() {
        for (rank, got) in on_ranks(3, PATIENCE, |star| {
            let all = star.gather(&[star.rank as u8; 2]).unwrap();
            let told = star.tell(vec![9; star.rank + 1]).unwrap();
            let mut sums = [0.1 * star.rank as f64, 1.0];
            star.sum(&mut sums).unwrap();
            let mut root = vec![star.rank as u8; PIECE_BYTES + 3];
            star.broadcast_bytes(&mut root).unwrap();
            (
                all,
                told,
                sums,
                root.iter().all(|&byte| byte == 0),
                star.any(star.rank == 1).unwrap(),
                star.any(false).unwrap(),
            )
        })
        .into_iter()
        .enumerate()
        {
            let all = if rank == 0 { vec![vec![0, 0], vec![1, 1], vec![2, 2]] } else { vec![] };
            assert_eq!(got, (all, vec![9], [0.1 + 0.2, 3.0], true, true, false));
        }
    }

    #[test]
    fn parts_of_all_ranks_make_the_whole_on_each() {
        // Of more than a piece, and of none.
        for n in [PIECE_BYTES / 3 + 5, 0] {
            let byte = |rank: usize, i: usize| (7 * rank + i % 251) as u8;
            let wholes = on_ranks(3, PATIENCE, |star| {
                let part: Vec<u8> = (0..n).map(|i| byte(star.rank, i)).collect();
                star.all_gather_bytes(&part).unwrap()
            });
            let expected: Vec<u8> = (0..3).flat_map(|rank| (0..n).map(move |i| byte(rank, i))).collect();
            assert!(wholes.iter().all(|whole| *whole == expected), "{n}");
        }
    }

    #[test]
    fn a_rank_alone_needs_nobody() {
        let got = on_ranks(1, PATIENCE, |star| {
            let mut values = [2.0f32];
            star.reduce_bytes(bytemuck::cast_slice_mut(&mut values), DType::F32, Reduction::Mean).unwrap();
            (values, star.any(false).unwrap(), star.gather(b"x").unwrap(), star.tell(vec![1]).unwrap())
        });
        assert_eq!(got, [([2.0], false, vec![b"x".to_vec()], vec![1])]);
    }

    #[test]
    fn a_rank_that_ends_is_named_on_all() {
        let texts = on_ranks(4, PATIENCE, |star| {
            star.note("step 17");
            star.any(false).unwrap();
            if star.rank == 2 {
                return String::new();
            }
            star.any(false).unwrap_err().to_string()
        });
        let text = "rank 2 has ended, or the connection to it; step 17";
        assert_eq!(texts, [text, text, "", text]);
    }

    #[test]
    fn the_end_of_rank_0_is_noticed() {
        let texts = on_ranks(3, PATIENCE, |star| match star.rank {
            0 => String::new(),
            _ => star.tell(vec![]).unwrap_err().to_string(),
        });
        assert_eq!(texts[1..], ["rank 0 has ended, or the connection to it; the run has not begun"; 2]);
    }

    #[test]
    fn a_rank_that_stands_still_is_given_up() {
        let patience = Duration::from_millis(200);
        let begun = Instant::now();
        let texts = on_ranks(3, patience, |star| {
            if star.rank == 1 {
                thread::sleep(4 * patience);
                return String::new();
            }
            star.any(false).unwrap_err().to_string()
        });
        assert!(begun.elapsed() < 10 * patience);
        assert!(texts[0].starts_with("nothing came from rank 1 in 0 s;"), "{texts:?}");
        // Rank 2 may have waited for rank 0 no longer than rank 0 for rank 1.
        assert!(texts[2] == texts[0] || texts[2].starts_with("nothing came from rank 0"), "{texts:?}");
    }

    #[test]
    fn what_fails_on_a_rank_is_told_by_rank_0() {
        let ends = on_ranks(3, PATIENCE, |star| {
            star.any(false).unwrap();
            let error = if star.rank == 1 {
                anyhow::anyhow!("train_3.bin: no such file").context("--train")
            } else {
                star.any(false).unwrap_err()
            };
            let error = star.give_up(error);
            (error.to_string(), matches!(error.downcast_ref(), Some(Fault::Told { lost: false, .. })))
        });
        let text = "rank 1 failed: --train: train_3.bin: no such file".to_owned();
        assert_eq!(ends, [(text.clone(), false), (text.clone(), true), (text, true)]);
    }

    #[test]
    fn what_fails_on_rank_0_reaches_the_others() {
        let ends = on_ranks(2, PATIENCE, |star| match star.rank {
            0 => star.give_up(anyhow::anyhow!("disk on fire")).to_string(),
            _ => star.any(false).unwrap_err().to_string(),
        });
        assert_eq!(ends, ["disk on fire", "disk on fire"]);
    }

    #[test]
    fn ranks_that_go_different_ways_are_found() {
        let texts = on_ranks(2, PATIENCE, |star| match star.rank {
            0 => star.any(false).unwrap_err().to_string(),
            _ => star.gather(&[]).and_then(|_| star.any(true)).unwrap_err().to_string(),
        });
        let text = "rank 1 is at another point of the run: expected Reduce 0 of 8 bytes, found Gather 0 of 0 bytes; the \
                    ranks have gone different ways";
        assert_eq!(texts, [text, text]);
        let texts = on_ranks(2, PATIENCE, |star| star.sum(&mut vec![0.0; 1 + star.rank]).unwrap_err().to_string());
        assert!(texts[1].contains("expected Reduce 0 of 8 bytes, found Reduce 0 of 16 bytes"), "{texts:?}");
    }
}
