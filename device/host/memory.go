package host

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// mapping is one piece of memory that the device knows.
type mapping struct {
	base device.Ptr
	mem  []byte
	full []byte // what the system gave for Alloc, rounded up; nil for memory of the caller

	// uses is 1 while the mapping is known, plus 1 for each access under way. At 0 nobody touches the memory again, and
	// idle is closed.
	uses atomic.Int64
	idle chan struct{}
	gone atomic.Bool // no longer known: accesses that wait should end
}

// acquire counts an access and reports whether the mapping is still there to be accessed.
func (m *mapping) acquire() bool {
	for {
		n := m.uses.Load()
		if n == 0 {
			return false
		}
		if m.uses.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// release ends an access.
func (m *mapping) release() {
	if m.uses.Add(-1) == 0 {
		close(m.idle)
	}
}

// end returns the address behind the last byte.
func (m *mapping) end() device.Ptr { return m.base + device.Ptr(len(m.mem)) }

// space is all memory that the device knows. Lookups take no lock: the table is replaced as a whole by whoever changes it.
type space struct {
	table atomic.Pointer[[]*mapping] // ordered by base, without overlaps

	mu          sync.Mutex
	closed      bool
	allocations int
	mappings    int
	bytes       int64
}

// load returns the table.
func (s *space) load() []*mapping {
	if t := s.table.Load(); t != nil {
		return *t
	}
	return nil
}

// after returns the index of the first mapping whose base lies behind p.
func after(table []*mapping, p device.Ptr) int {
	lo, hi := 0, len(table)
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		if table[mid].base <= p {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// find returns the mapping that holds the n bytes at p, and the offset of p in it, or nil.
func (s *space) find(p device.Ptr, n int64) (*mapping, int) {
	table := s.load()
	i := after(table, p) - 1
	if i < 0 || n < 0 {
		return nil, 0
	}
	m := table[i]
	offset, size := uint64(p-m.base), uint64(len(m.mem))
	if offset > size || uint64(n) > size-offset {
		return nil, 0
	}
	return m, int(offset)
}

// check reports by its error whether the n bytes at p are in one mapping.
func (s *space) check(op, arg string, p device.Ptr, n int64) error {
	if m, _ := s.find(p, n); m == nil {
		return s.refuse(op, arg, p, n)
	}
	return nil
}

// checkWord is check for an aligned 32-bit word.
func (s *space) checkWord(op string, p device.Ptr) error {
	if p%4 != 0 {
		return errs.Invalid(op, "p", p, "a multiple of 4")
	}
	return s.check(op, "p", p, 4)
}

// pin returns the n bytes at p and keeps their mapping from being unmapped until the caller releases it.
func (s *space) pin(op, arg string, p device.Ptr, n int64) (*mapping, []byte, error) {
	m, offset := s.find(p, n)
	if m == nil || !m.acquire() {
		return nil, nil, s.refuse(op, arg, p, n)
	}
	return m, m.mem[offset : offset+int(n) : offset+int(n)], nil
}

// refuse returns the error for n bytes at p that are not in one mapping.
func (s *space) refuse(op, arg string, p device.Ptr, n int64) error {
	if n < 0 {
		return errs.Invalid(op, "bytes", n, "0 and more")
	}
	table := s.load()
	allowed := "memory that Alloc gave or Map was told of; the device knows none"
	if i := after(table, p) - 1; i >= 0 {
		allowed = fmt.Sprintf("wholly inside one mapping of the device; the nearest below is [%v, %v)", table[i].base, table[i].end())
	} else if len(table) > 0 {
		allowed = fmt.Sprintf("wholly inside one mapping of the device; the first is [%v, %v)", table[0].base, table[0].end())
	}
	return errs.Invalid(op, arg, fmt.Sprintf("%v with %d bytes", p, n), allowed)
}

// add makes m known.
func (s *space) add(op string, m *mapping) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return closed(op, "device")
	}
	old := s.load()
	i := after(old, m.base)
	if i > 0 && old[i-1].end() > m.base || i < len(old) && m.end() > old[i].base {
		return errs.Invalid(op, "memory", fmt.Sprintf("[%v, %v)", m.base, m.end()),
			"memory that does not overlap with what the device knows already; Unmap that first")
	}
	table := make([]*mapping, 0, len(old)+1)
	table = append(append(append(table, old[:i]...), m), old[i:]...)
	s.table.Store(&table)
	s.count(m, 1)
	return nil
}

// count adds sign times m to the statistics; the lock is held.
func (s *space) count(m *mapping, sign int) {
	if m.full == nil {
		s.mappings += sign
		return
	}
	s.allocations += sign
	s.bytes += int64(sign) * int64(len(m.mem))
}

// take removes the mapping at exactly p, waits for the accesses under way, and returns it. owned asks for one that Alloc made.
func (s *space) take(op string, p device.Ptr, owned bool) (*mapping, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, closed(op, "device")
	}
	old := s.load()
	i := after(old, p) - 1
	if i < 0 || old[i].base != p || (old[i].full != nil) != owned {
		s.mu.Unlock()
		allowed := "an address that Map gave and that was not unmapped yet; memory of Alloc is given back by Free"
		if owned {
			allowed = "an address that Alloc gave and that was not freed yet; memory of the caller is given back by Unmap"
		}
		return nil, errs.Invalid(op, "p", p, allowed)
	}
	m := old[i]
	table := make([]*mapping, 0, len(old)-1)
	table = append(append(table, old[:i]...), old[i+1:]...)
	s.table.Store(&table)
	s.count(m, -1)
	s.mu.Unlock()
	m.retire()
	return m, nil
}

// retire waits until nobody accesses the mapping, which must be out of the table.
func (m *mapping) retire() {
	m.gone.Store(true)
	m.release()
	<-m.idle
}

// close forgets all mappings and frees those that Alloc made.
func (s *space) close() (allocations, mappings int, err error) {
	s.mu.Lock()
	table := s.load()
	allocations, mappings = s.allocations, s.mappings
	s.closed = true
	s.table.Store(nil)
	s.allocations, s.mappings, s.bytes = 0, 0, 0
	s.mu.Unlock()
	for _, m := range table {
		m.retire()
		if m.full != nil {
			if e := giveBack(m.full); e != nil && err == nil {
				err = fmt.Errorf("giving back the memory at %v: %w", m.base, e)
			}
		}
	}
	return allocations, mappings, err
}

// newMapping describes mem, which must not be empty.
func newMapping(mem, full []byte) *mapping {
	m := &mapping{
		base: device.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))),
		mem:  mem,
		full: full,
		idle: make(chan struct{}),
	}
	m.uses.Store(1)
	return m
}

// Alloc returns bytes (> 0) of memory filled with zeros, aligned to 256 bytes at least; on Linux it begins on a page of its
// own. Free releases it.
func (d *Device) Alloc(bytes int64) (device.Ptr, error) {
	if err := d.made("Alloc"); err != nil {
		return 0, err
	}
	const op = "Alloc"
	if d.closed.Load() {
		return 0, closed(op, "device")
	}
	// The margin leaves room for rounding up to pages, whatever their size.
	const most = math.MaxInt - 1<<30
	if bytes <= 0 || bytes > most {
		return 0, errs.Invalid(op, "bytes", bytes, fmt.Sprintf("1 to %d", int64(most)))
	}
	full, mem, err := obtain(int(bytes))
	if err != nil {
		return 0, fmt.Errorf("allocating %d bytes of host memory: %w", bytes, err)
	}
	m := newMapping(mem, full)
	if err := d.space.add(op, m); err != nil {
		if e := giveBack(full); e != nil {
			err = fmt.Errorf("%w (and giving the memory back: %w)", err, e)
		}
		return 0, err
	}
	return m.base, nil
}

// Free releases memory that Alloc returned, after the copies that are under way in it. Queued work that still uses it will fail.
func (d *Device) Free(p device.Ptr) error {
	m, err := d.space.take("Free", p, true)
	if err != nil {
		return err
	}
	if err := giveBack(m.full); err != nil {
		return fmt.Errorf("freeing the host memory at %v: %w", p, err)
	}
	return nil
}

// Map makes memory of the caller known to the device, which may then copy and wait in all of b, and returns its address. b is usually memory that the
// caller has mapped. It must stay where it is, readable and writable, until Unmap has returned or the device is closed. Map copies nothing, and the
// memory remains the caller's. The error is ErrInvalid if b is empty or overlaps with memory that the device knows.
func (d *Device) Map(b []byte) (device.Ptr, error) {
	if err := d.made("Map"); err != nil {
		return 0, err
	}
	const op = "Map"
	if d.closed.Load() {
		return 0, closed(op, "device")
	}
	if len(b) == 0 {
		return 0, errs.Invalid(op, "len(b)", 0, "1 and more")
	}
	m := newMapping(b[:len(b):len(b)], nil)
	if err := d.space.add(op, m); err != nil {
		return 0, err
	}
	return m.base, nil
}

// Unmap makes the device forget memory that Map made known; p is the address that Map returned. It waits for copies that are under way in it, so that
// the caller may unmap it from the process afterwards; a WaitValue32 in it ends with an error. The caller has to wait for kernels and for holders of
// Bytes. Queued work that still uses the memory will fail.
func (d *Device) Unmap(p device.Ptr) error {
	_, err := d.space.take("Unmap", p, false)
	return err
}

// Bytes returns the n bytes at p as a slice of the memory itself. The error says that they do not lie in one mapping. The slice must not be used
// after that memory is freed or unmapped.
func (d *Device) Bytes(p device.Ptr, n int64) ([]byte, error) {
	if d.closed.Load() {
		return nil, closed("Bytes", "device")
	}
	m, offset := d.space.find(p, n)
	if m == nil {
		return nil, d.space.refuse("Bytes", "p", p, n)
	}
	return m.mem[offset : offset+int(n) : offset+int(n)], nil
}

// CopyFromHost copies src to dst before it returns. It is not ordered with any stream.
func (d *Device) CopyFromHost(dst device.Ptr, src []byte) error {
	return d.move("CopyFromHost", "dst", dst, src, false)
}

// CopyToHost copies len(dst) bytes at src to dst before it returns. It is not ordered with any stream.
func (d *Device) CopyToHost(dst []byte, src device.Ptr) error {
	return d.move("CopyToHost", "src", src, dst, true)
}

// move copies between b and the memory at p.
func (d *Device) move(op, arg string, p device.Ptr, b []byte, out bool) (err error) {
	if err := d.made(op); err != nil {
		return err
	}
	if d.closed.Load() {
		return closed(op, "device")
	}
	if len(b) == 0 {
		return nil
	}
	m, mem, err := d.space.pin(op, arg, p, int64(len(b)))
	if err != nil {
		return err
	}
	defer m.release()
	// Memory of the caller may turn out not to be there, as when its file was cut short.
	defer faultsAsErrors(op, &err)()
	if out {
		copy(b, mem)
	} else {
		copy(mem, b)
	}
	return nil
}

// fill sets all of b to value.
func fill(b []byte, value byte) {
	if value == 0 {
		clear(b)
		return
	}
	head := b[:min(len(b), 4096)]
	for i := range head {
		head[i] = value
	}
	for done := len(head); done < len(b); done += len(head) {
		copy(b[done:], head)
	}
}

// word returns the 32-bit word that b, 4 bytes, is. Its address is aligned: checkWord saw to that.
func word(b []byte) *uint32 { return (*uint32)(unsafe.Pointer(unsafe.SliceData(b))) }
