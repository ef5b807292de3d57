//! Faults of the host's memory protection in kernels: fiber stack overflows, and accesses through pointers that no view has checked.
//!
//! A signal handler lets the fiber that faulted return with a report. A fault elsewhere goes to the handler that was installed before.

use super::block::{Block, fiber_at, running_block};
use super::report::{Fault, Report};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

/// The signal that the watchdog sends to an OS thread whose kernel runs without calling this crate. By default it is ignored.
pub const STUCK: libc::c_int = libc::SIGURG;

/// The handlers that were installed before.
static PREVIOUS: OnceLock<[libc::sigaction; 3]> = OnceLock::new();
const SIGNALS: [libc::c_int; 3] = [libc::SIGSEGV, libc::SIGBUS, STUCK];

/// Installs the handler once.
pub fn install() {
    PREVIOUS.get_or_init(|| SIGNALS.map(install_for));
}

fn install_for(signal: libc::c_int) -> libc::sigaction {
    let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all-zero is a valid sigaction, and both pointers are valid. The handler runs on the alternate stack that the standard
    // library gives each thread, and calls only functions that are safe in a handler: the fiber that faulted holds no lock.
    unsafe {
        let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = handle;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(signal, &raw const action, previous.as_mut_ptr());
        previous.assume_init()
    }
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a siginfo, with an address for memory faults, and the context of the interrupted code.
    let handled = unsafe {
        let address = (signal != STUCK).then(|| (*info).si_addr().addr());
        leave_fiber(address, context.cast())
    };
    let index = SIGNALS.iter().position(|known| *known == signal);
    let previous = index.and_then(|index| Some(PREVIOUS.get()?[index]));
    if let (false, true, Some(previous)) = (handled, signal != STUCK, previous) {
        // The instruction faults again when this handler returns, and the previous handler gets the signal.
        // SAFETY: the action was returned by sigaction.
        unsafe { libc::sigaction(signal, &raw const previous, ptr::null_mut()) };
    }
}

/// Lets the interrupted fiber of this OS thread return with a report of an access to `address`, or of an endless loop. Returns false if the
/// signal did not arrive in a fiber.
///
/// # Safety
/// `context` is that of the interrupted code.
unsafe fn leave_fiber(address: Option<usize>, context: *mut libc::ucontext_t) -> bool {
    let block = running_block();
    if block.is_null() {
        return false;
    }
    // SAFETY: the block is alive while it runs, and the interrupted code does not continue.
    let thread = unsafe { (*block).current };
    let Some(fiber) = fiber_at(thread) else { return false };
    // SAFETY: the fiber is alive while its block runs.
    let (trap, overflow) =
        unsafe { ((*fiber).trap_handler(), address.is_some_and(|address| is_guard(&*fiber, address))) };
    // SAFETY: guaranteed by the caller.
    let registers = unsafe { &mut (*context).uc_mcontext };
    if !trap.stack_ptr_in_bounds(stack_pointer(registers)) {
        return false;
    }
    // SAFETY: the stack pointer is in the fiber. The values on its stack are leaked. They hold no lock, because kernels have none.
    let to = unsafe { trap.setup_trap_handler(move || report(address, overflow)) };
    set_registers(registers, &to);
    true
}

/// Returns whether `address` is in the guard page of the fiber's stack.
fn is_guard(fiber: &super::block::Fiber, address: usize) -> bool {
    const PAGE: usize = 4096;
    let trap = fiber.trap_handler();
    trap.stack_ptr_in_bounds(address) && !(1..=PAGE).all(|back| trap.stack_ptr_in_bounds(address.wrapping_sub(back)))
}

/// Ends the running thread with a report. Runs on the stack of the fiber that faulted.
fn report(address: Option<usize>, overflow: bool) {
    super::block::with(|block: &mut Block| {
        let (fault, message) = if address.is_none() {
            let message = "livelock: the thread runs in a loop that calls nothing of cuda_std, so the emulator cannot let other threads run; \
                 to wait for another thread, use the atomics of a view instead of core's";
            (Fault::Livelock, message.to_owned())
        } else if overflow {
            let bytes = super::stack::BYTES >> 10;
            let advice =
                "the emulator gives each thread that much; keep large arrays in shared memory, and do not recurse";
            (Fault::StackOverflow, format!("stack overflow: the thread needs more than {bytes} KiB of stack; {advice}"))
        } else {
            let advice = "access memory only through the views of cuda_std, which are checked";
            (
                Fault::Segmentation,
                format!("segmentation fault: access to address {:#x}; {advice}", address.unwrap_or(0)),
            )
        };
        block.end_thread(Report { thread: Some(block.current as u32), ..block.report_of(fault, None, None, message) });
    });
}

#[cfg(target_arch = "x86_64")]
fn stack_pointer(registers: &libc::mcontext_t) -> usize {
    registers.gregs[libc::REG_RSP as usize] as usize
}

#[cfg(target_arch = "x86_64")]
fn set_registers(registers: &mut libc::mcontext_t, to: &corosensei::trap::TrapHandlerRegs) {
    let values = [
        (libc::REG_RIP, to.rip),
        (libc::REG_RSP, to.rsp),
        (libc::REG_RBP, to.rbp),
        (libc::REG_RDI, to.rdi),
        (libc::REG_RSI, to.rsi),
    ];
    for (register, value) in values {
        registers.gregs[register as usize] = value as i64;
    }
}

#[cfg(target_arch = "aarch64")]
fn stack_pointer(registers: &libc::mcontext_t) -> usize {
    registers.sp as usize
}

#[cfg(target_arch = "aarch64")]
fn set_registers(registers: &mut libc::mcontext_t, to: &corosensei::trap::TrapHandlerRegs) {
    (registers.pc, registers.sp) = (to.pc, to.sp);
    (registers.regs[0], registers.regs[1]) = (to.x0, to.x1);
    (registers.regs[29], registers.regs[30]) = (to.x29, to.lr);
}
