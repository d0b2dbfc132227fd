package trace

import (
	"encoding/binary"
	"time"
)

// maxName bounds a span's name, in bytes. Some names contain a plugin's name.
const maxName = 64

// Part is a recorded span.
type Part struct {
	Name   string
	Parent int   // index of the parent; -1: none
	Began  int64 // nanoseconds since the operation started
	Ended  int64
	Open   bool // the span still runs, so Ended is the time of the reading
}

// parts reads a slab that other goroutines may still write. It skips a span whose fields are being
// written, and attaches that span's children to the operation.
func (all *slab) parts(zero int64) (parts []Part, missing int) {
	taken, room := int(all.taken.Load()), len(all.spans)
	parts = make([]Part, 0, min(taken, room))
	place := [MaxLargeSpans]int{} // index of a span in parts, plus one
	for i := range min(taken, room) {
		s := &all.spans[i]
		began := s.began.Load()
		if began == 0 {
			missing++
			continue
		}
		ended := s.ended.Load()
		p := Part{Name: s.name, Parent: -1, Began: began - zero, Open: ended == 0}
		if p.Open {
			ended = Now()
		}
		p.Ended = ended - zero
		if s.parent >= 0 {
			p.Parent = max(place[s.parent]-1, 0)
		}
		parts = append(parts, p)
		place[i] = len(parts)
	}
	return parts, missing + max(taken-room, 0)
}

// pack encodes a slab compactly. The encoding has the number of spans, the number of missing spans,
// and then the spans. Each span has its name, parent, start relative to the previous span, and
// duration.
func pack(all *slab, zero int64) string {
	parts, missing := all.parts(zero)
	out := make([]byte, 0, 16*len(parts)+16)
	out = binary.AppendUvarint(out, uint64(len(parts)))
	out = binary.AppendUvarint(out, uint64(missing))
	var last int64
	for _, p := range parts {
		name := p.Name[:min(len(p.Name), maxName)]
		out = append(out, byte(len(name)))
		out = append(out, name...)
		out = append(out, byte(p.Parent+1))
		out = binary.AppendVarint(out, p.Began-last)
		took := uint64(p.Ended-p.Began) << 1
		if p.Open {
			took |= 1
		}
		out = binary.AppendUvarint(out, took)
		last = p.Began
	}
	return string(out)
}

// unpack is the inverse of pack.
func unpack(packed string) (parts []Part, missing int) {
	in := []byte(packed)
	uvarint := func() uint64 {
		v, n := binary.Uvarint(in)
		in = in[n:]
		return v
	}
	parts = make([]Part, uvarint())
	missing = int(uvarint())
	var last int64
	for i := range parts {
		p := &parts[i]
		length := int(in[0])
		p.Name, p.Parent = string(in[1:1+length]), int(in[1+length])-1
		in = in[2+length:]
		began, n := binary.Varint(in)
		in = in[n:]
		p.Began = last + began
		took := uvarint()
		p.Ended, p.Open = p.Began+int64(took>>1), took&1 != 0
		last = p.Began
	}
	return parts, missing
}

// Parts returns the spans recorded so far, and the number of spans beyond the limit. The operation
// is first, and parents precede children.
func (t *Trace) Parts() (parts []Part, missing int) {
	if all := t.slab.Load(); all != nil {
		return all.parts(t.zero)
	}
	return unpack(*t.packed.Load())
}

// Began returns the start of the operation on the wall clock.
func (t *Trace) Began() time.Time { return time.Unix(0, t.wall) }
