// Package fence is the page that a manager and the daemon share, by which a silent engine can be told not to promise what
// it may not have heard of (rules F1 and F2).
//
//	offset 0   u32  window   the manager: 1 from before its first lookup of a step until its pins are sent
//	offset 8   u64  fence    the daemon: a hit needs removals applied up to here
//	offset 16  u64  sends    the daemon: counts up behind each send, so that a manager need not look for what is not there
//
// The manager writes the window, then reads the fence. The daemon writes the fence, lets a barrier pass on every
// processor, then reads the window. So either the manager sees the fence, or the daemon sees the window.
package fence

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Size of the page in bytes.
const Size = 4096

const offWindow, offFence, offSends = 0, 8, 16

// Page is a mapped session page. Its methods may be called concurrently, Close excepted.
type Page struct {
	mem []byte
}

// New makes a page and the file to pass on; the caller closes the file.
func New() (*Page, *os.File, error) {
	fd, err := unix.MemfdCreate("kvlift-session", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, nil, fmt.Errorf("make a session page: %w", err)
	}
	f := os.NewFile(uintptr(fd), "kvlift-session")
	if err := f.Truncate(Size); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make a session page: %w", err), f.Close())
	}
	p, err := Map(f)
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return p, f, nil
}

// Map maps a page that came as a descriptor. The file may be closed afterwards. It fails when the file is shorter than a
// page, which would be a fault at the first access.
func Map(f *os.File) (*Page, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("map the session page: %w", err)
	}
	if st.Size < Size {
		return nil, fmt.Errorf("map the session page: %d bytes", st.Size)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, Size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the session page: %w", err)
	}
	return &Page{mem}, nil
}

// Close unmaps the page. It is idempotent.
func (p *Page) Close() error {
	if p == nil || p.mem == nil {
		return nil
	}
	err := unix.Munmap(p.mem)
	p.mem = nil
	return err
}

// A mapping starts at a page, so all words are aligned.

func (p *Page) window() *uint32 { return (*uint32)(unsafe.Pointer(&p.mem[offWindow : offWindow+4][0])) }
func (p *Page) word() *uint64   { return (*uint64)(unsafe.Pointer(&p.mem[offFence : offFence+8][0])) }
func (p *Page) sends() *uint64  { return (*uint64)(unsafe.Pointer(&p.mem[offSends : offSends+8][0])) }

// Open says that a window is open, and returns the fence: a hit needs removals applied up to it. The order of the two
// accesses is the point; both are sequentially consistent.
func (p *Page) Open() (fence uint64) {
	atomic.StoreUint32(p.window(), 1)
	return atomic.LoadUint64(p.word())
}

// Shut says that no window is open and that everything that was promised in the last one has been sent.
func (p *Page) Shut() { atomic.StoreUint32(p.window(), 0) }

// Sent says that something was sent to the manager: it lies in its socket already.
func (p *Page) Sent() { atomic.AddUint64(p.sends(), 1) }

// Sends is how often Sent was called. A manager that has read all that came before an equal number has nothing to read, but
// for the end of the stream, which is not counted.
func (p *Page) Sends() uint64 { return atomic.LoadUint64(p.sends()) }

// Windowed tells whether a window is open. Only after Raise it says anything about the next moment.
func (p *Page) Windowed() bool { return atomic.LoadUint32(p.window()) != 0 }

// Raise sets the fence beyond every removal, so that no lookup of a window that opens from now on hits, and tells whether one
// was open already. It takes some ten milliseconds: the barrier waits for every processor. ok is false where the kernel has
// no such barrier; then nobody can be fenced. Lower takes it back.
func (p *Page) Raise() (open, ok bool) {
	atomic.StoreUint64(p.word(), math.MaxUint64)
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		return true, false
	}
	return p.Windowed(), true
}

// Lower sets the fence to a removal: whoever has applied it may promise again.
func (p *Page) Lower(epoch uint64) { atomic.StoreUint64(p.word(), epoch) }

// Fence is what was set last.
func (p *Page) Fence() uint64 { return atomic.LoadUint64(p.word()) }

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h: it reaches processes that did not register.
const membarrierGlobal = 1
