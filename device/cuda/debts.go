package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/symmem/symmem/device"
)

const (
	// faultPage is the size of the blocks of pinned memory that fault cells come from.
	faultPage = 16 << 10
	// fewCells is how many free fault cells are kept for enqueueing: making more waits for the GPU.
	fewCells = faultPage / int(unsafe.Sizeof(device.FaultCell{})) / 2
)

// faultCell is a fault cell in pinned memory.
type faultCell struct {
	*device.FaultCell
	at   device.Ptr
	word *FaultWord // makes errors of its values
}

// gaveUp returns how many launches have given up so far.
func (c *faultCell) gaveUp() uint32 { return atomic.LoadUint32(&c.GaveUp) }

// finding is a failure that a kernel has reported.
type finding struct {
	word  *FaultWord
	value uint64
	more  uint32 // how many launches have failed after it
	known error  // the error, if it was made already
}

// since returns what launches have reported beyond the first told reports, if anything, and notes that the host has seen it.
func (c *faultCell) since(told uint32) (f finding, gaveUp uint32, is bool) {
	gaveUp = c.gaveUp()
	if gaveUp == told {
		return finding{}, gaveUp, false
	}
	f = finding{word: c.word, value: atomic.LoadUint64(&c.Fault), more: gaveUp - told - 1}
	atomic.StoreUint32(&c.Told, gaveUp)
	return f, gaveUp, true
}

// err returns the finding as an error.
func (f finding) err() error {
	if f.known != nil {
		return f.known
	}
	err := f.word.err(f.value)
	if f.more > 0 {
		return fmt.Errorf("%w (and %d later failures)", err, f.more)
	}
	return err
}

// debts list what a stream has to look at before it may say that its work has not failed: memory that kernels write when they give up. The device's
// faultMu guards them; while it is held nothing is locked but a fault word.
type debts struct {
	launches uint64       // noted so far
	cells    []*faultCell // of the launches that were not recorded, one for each word
	words    []wordDebt
	graphs   []graphDebt
	spare    [][]uint32 // for graphs to come
	kept     []finding  // of words that were closed, and graphs that have gone, before the stream could tell
}

// wordDebt is a fault word that launches on the stream write.
type wordDebt struct {
	word *FaultWord
	last uint64 // the latest of them
}

// graphDebt is a graph that was launched on the stream. If it was launched on several streams and not all launches have ended, it is not known whose
// launch has failed, and all streams report it.
type graphDebt struct {
	parts  *graphParts
	last   uint64   // the latest launch
	gaveUp []uint32 // by cell: how many launches had given up before, or have and were told
}

// found returns what the graph's launches have reported and found has not returned yet. faultMu is held.
func (g graphDebt) found() []finding {
	var all []finding
	for i, c := range g.parts.cells {
		f, gaveUp, is := c.since(g.gaveUp[i])
		if is {
			all = append(all, f)
			g.gaveUp[i] = gaveUp
		}
	}
	return all
}

// oweWord notes that a launch on the stream writes f when it gives up. The stream is locked, so that Synchronize finds the launch after the note.
func (s *Stream) oweWord(f *FaultWord) {
	s.dev.faultMu.Lock()
	defer s.dev.faultMu.Unlock()
	s.oweWordLocked(f)
}

func (s *Stream) oweWordLocked(f *FaultWord) {
	o := &s.debts
	o.launches++
	for i := range o.words {
		if o.words[i].word == f {
			o.words[i].last = o.launches
			return
		}
	}
	o.words = append(o.words, wordDebt{word: f, last: o.launches})
}

// oweGraph notes a launch of the graph that has these parts. The stream is locked.
func (s *Stream) oweGraph(parts *graphParts) {
	s.dev.faultMu.Lock()
	defer s.dev.faultMu.Unlock()
	for _, f := range parts.words {
		s.oweWordLocked(f)
	}
	if parts.empty() {
		return
	}
	o := &s.debts
	o.launches++
	for i := range o.graphs {
		if o.graphs[i].parts == parts {
			o.graphs[i].last = o.launches
			return
		}
	}
	debt := graphDebt{parts: parts, last: o.launches, gaveUp: o.counts(len(parts.cells))}
	for i, c := range parts.cells {
		debt.gaveUp[i] = c.gaveUp()
	}
	o.graphs = append(o.graphs, debt)
	parts.debtors = append(parts.debtors, s)
}

// mostSpare is how many counts of graphs are kept for those that are launched next.
const mostSpare = 4

// counts takes the place of n counts, so that launching a graph again makes no garbage. faultMu is held.
func (o *debts) counts(n int) []uint32 {
	for i, c := range o.spare {
		if cap(c) >= n {
			o.spare = slices.Delete(o.spare, i, i+1)
			return c[:n]
		}
	}
	return make([]uint32, n)
}

// cell returns the stream's own cell for launches that are not recorded and whose values f decodes.
func (s *Stream) cell(f *FaultWord) (*faultCell, error) {
	d := s.dev
	d.faultMu.Lock()
	for _, c := range s.debts.cells {
		if c.word == f {
			d.faultMu.Unlock()
			return c, nil
		}
	}
	d.faultMu.Unlock()
	c, err := d.takeCell(f)
	if err != nil {
		return nil, err
	}
	d.faultMu.Lock()
	defer d.faultMu.Unlock()
	s.debts.cells = append(s.debts.cells, c) // the stream is locked, so nobody else has made one
	return c, nil
}

// owed returns how many launches were noted; all enqueued before the call are among them.
func (s *Stream) owed() uint64 {
	s.dev.faultMu.Lock()
	defer s.dev.faultMu.Unlock()
	return s.debts.launches
}

// pay returns what the stream's kernels have reported and no call of pay has returned yet, and forgets the launches up to upTo, which have ended.
func (s *Stream) pay(upTo uint64) error {
	d := s.dev
	o := &s.debts
	d.faultMu.Lock()
	found := o.kept
	o.kept = nil
	for _, c := range o.cells {
		if f, _, is := c.since(c.Told); is {
			found = append(found, f)
		}
	}
	o.graphs = slices.DeleteFunc(o.graphs, func(g graphDebt) bool {
		found = append(found, g.found()...)
		if g.last > upTo {
			return false
		}
		g.parts.paid(s)
		if len(o.spare) < mostSpare {
			o.spare = append(o.spare, g.gaveUp)
		}
		return true
	})
	o.words = slices.DeleteFunc(o.words, func(w wordDebt) bool {
		if value := w.word.Load(); value != 0 {
			found = append(found, finding{word: w.word, value: value})
		}
		return w.last <= upTo
	})
	d.faultMu.Unlock()
	var failed []error
	for _, f := range found {
		failed = append(failed, f.err())
	}
	return join(failed...)
}

// join is [errors.Join], but returns a single error as it is.
func join(all ...error) error {
	all = slices.DeleteFunc(all, func(err error) bool { return err == nil })
	if len(all) == 1 {
		return all[0]
	}
	return errors.Join(all...)
}

// leave returns the stream's cells to the pool: its work has ended, and nobody can ask it any more.
func (s *Stream) leave() {
	d := s.dev
	d.faultMu.Lock()
	defer d.faultMu.Unlock()
	for _, g := range s.debts.graphs {
		g.parts.paid(s)
	}
	for _, c := range s.debts.cells {
		d.dropCell(c)
	}
	s.debts = debts{}
}

// settle makes all streams keep what they have to report of f, which is being closed.
func (d *Device) settle(f *FaultWord) {
	type told struct {
		stream *Stream
		finding
	}
	var found []told
	streams := d.openStreams()
	d.faultMu.Lock()
	for _, s := range streams {
		o := &s.debts
		o.cells = slices.DeleteFunc(o.cells, func(c *faultCell) bool {
			if c.word != f {
				return false
			}
			if x, _, is := c.since(c.Told); is {
				found = append(found, told{s, x})
			}
			d.dropCell(c)
			return true
		})
		o.words = slices.DeleteFunc(o.words, func(w wordDebt) bool {
			if w.word != f {
				return false
			}
			if value := f.Load(); value != 0 {
				found = append(found, told{s, finding{word: f, value: value}})
			}
			return true
		})
	}
	d.faultMu.Unlock()
	for _, x := range found {
		x.known = x.err()
		d.faultMu.Lock()
		x.stream.debts.kept = append(x.stream.debts.kept, x.finding)
		d.faultMu.Unlock()
	}
}

// leave returns the cells to the pool: nothing of the graph is left. Streams keep what they still have to report of it.
func (g *graphParts) leave(d *Device) {
	d.faultMu.Lock()
	defer d.faultMu.Unlock()
	for _, s := range g.debtors {
		o := &s.debts
		o.graphs = slices.DeleteFunc(o.graphs, func(debt graphDebt) bool {
			if debt.parts == g {
				o.kept = append(o.kept, debt.found()...)
			}
			return debt.parts == g
		})
	}
	for _, c := range g.cells {
		d.dropCell(c)
	}
	g.cells, g.debtors = nil, nil
}

// paid notes that the stream has reported everything about the graph's launches on it. faultMu is held.
func (g *graphParts) paid(s *Stream) {
	g.debtors = slices.DeleteFunc(g.debtors, func(o *Stream) bool { return o == s })
}

// fail keeps the error of work in the graph for the streams that it was launched on and that were not synchronized since.
func (g *graphParts) fail(d *Device, e *device.WorkError) {
	d.faultMu.Lock()
	debtors := slices.Clone(g.debtors)
	d.faultMu.Unlock()
	if len(debtors) == 0 {
		d.log.Warn("work of a graph failed and no launch of the graph is known", "error", e)
	}
	for _, s := range debtors {
		own := *e
		s.fail(&own)
	}
}

// ends tells when the waits and works of the graph end because a stream that it was launched on is being closed; zero while all are open. Launches of the graph
// follow each other, whichever streams they are on, and nobody knows whose the GPU is in: it may be that of the closing stream, or one which that stream waits for.
func (g *graphParts) ends(d *Device) time.Time {
	var first time.Time
	note := func(s *Stream) {
		if by := s.waits.ends(); !by.IsZero() && (first.IsZero() || by.Before(first)) {
			first = by
		}
	}
	if s := g.stream.Load(); s != nil {
		note(s)
	}
	d.faultMu.Lock()
	defer d.faultMu.Unlock()
	for _, s := range g.debtors {
		note(s)
	}
	return first
}

// takeCell returns a cell for values that f decodes.
func (d *Device) takeCell(f *FaultWord) (*faultCell, error) {
	if err := d.needCells(1); err != nil {
		return nil, err
	}
	d.faultMu.Lock()
	defer d.faultMu.Unlock()
	if len(d.cells) == 0 {
		return nil, fmt.Errorf("%w: hundreds of launches that report failures are enqueued for the first time at the same moment", device.ErrNoMemory)
	}
	n := len(d.cells) - 1
	c := d.cells[n]
	d.cells = d.cells[:n]
	*c.FaultCell = device.FaultCell{}
	c.word = f
	return c, nil
}

// dropCell returns a cell to the pool that nothing enqueued writes any more. faultMu is held.
func (d *Device) dropCell(c *faultCell) {
	if d.faultPages != nil { // else the device was closed
		d.cells = append(d.cells, c)
	}
}

// needCells makes more cells if there are fewer than n.
func (d *Device) needCells(n int) error {
	d.faultMu.Lock()
	have := len(d.cells)
	d.faultMu.Unlock()
	if have >= n {
		return nil
	}
	if err := d.push(); err != nil {
		return err
	}
	defer d.pop()
	mem, at, err := d.pinned(faultPage)
	if err != nil {
		return fmt.Errorf("making fault cells: %w", err)
	}
	cells := unsafe.Slice((*device.FaultCell)(mem), faultPage/int(unsafe.Sizeof(device.FaultCell{})))
	d.faultMu.Lock()
	defer d.faultMu.Unlock()
	d.faultPages = append(d.faultPages, mem)
	for i := range cells {
		d.cells = append(d.cells, &faultCell{FaultCell: &cells[i], at: at.Add(int64(i) * int64(unsafe.Sizeof(cells[i])))})
	}
	return nil
}
