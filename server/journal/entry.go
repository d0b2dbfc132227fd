package journal

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The file has a header (magic, number of the first event) and entries. An entry has a head
// (checksum of the rest, size of the event, size of its short form, number) and an event. The
// beginning of the event is its short form: an event without statuses of containers. All numbers
// are little-endian.
const (
	magic      = "berthev1"
	headerSize = 16
	headSize   = 24
	maxEvent   = 64 << 20 // bytes; larger than any CRI message
)

var checksums = crc32.MakeTable(crc32.Castagnoli)

// header returns the header of a file that has all events from first on.
func header(first uint64) []byte { return binary.LittleEndian.AppendUint64([]byte(magic), first) }

// entry is an encoded entry.
type entry []byte

// newEntry encodes an event. Protobuf allows any order of fields.
func newEntry(number uint64, event *runtimeapi.ContainerEventResponse) (entry, error) {
	short, err := proto.Marshal(&runtimeapi.ContainerEventResponse{
		ContainerId:        event.ContainerId,
		ContainerEventType: event.ContainerEventType,
		CreatedAt:          event.CreatedAt,
		PodSandboxStatus:   event.PodSandboxStatus,
	})
	if err != nil {
		return nil, fmt.Errorf("encode event of %s: %w", event.ContainerId, err)
	}
	rest, err := proto.Marshal(&runtimeapi.ContainerEventResponse{ContainersStatuses: event.ContainersStatuses})
	if err != nil {
		return nil, fmt.Errorf("encode containers in event of %s: %w", event.ContainerId, err)
	}
	return pack(number, short, rest), nil
}

func pack(number uint64, short, rest []byte) entry {
	e := make(entry, 4, headSize+len(short)+len(rest))
	e = binary.LittleEndian.AppendUint64(e, uint64(len(short)+len(rest)))
	e = binary.LittleEndian.AppendUint32(e, uint32(len(short)))
	e = binary.LittleEndian.AppendUint64(e, number)
	e = append(append(e, short...), rest...)
	binary.LittleEndian.PutUint32(e, crc32.Checksum(e[4:], checksums))
	return e
}

func (e entry) number() uint64 { return binary.LittleEndian.Uint64(e[16:]) }
func (e entry) size() int64    { return headSize + int64(binary.LittleEndian.Uint64(e[4:])) }
func (e entry) event() []byte  { return e[headSize:] }
func (e entry) short() []byte  { return e[headSize:][:binary.LittleEndian.Uint32(e[12:])] }

// valid reports whether an entry with a complete head is whole and undamaged.
func (e entry) valid() bool {
	return e.size() == int64(len(e)) && int(binary.LittleEndian.Uint32(e[12:])) <= len(e)-headSize &&
		crc32.Checksum(e[4:], checksums) == binary.LittleEndian.Uint32(e)
}

// sane reports whether the head has a possible size.
func (e entry) sane() bool { return binary.LittleEndian.Uint64(e[4:]) <= maxEvent }

// contents are the undamaged entries of a file.
type contents struct {
	first   uint64
	entries []entry
	size    int64 // of the undamaged part
}

func (c contents) last() uint64 {
	if len(c.entries) == 0 {
		return c.first - 1
	}
	return max(c.entries[len(c.entries)-1].number(), c.first-1)
}

// parse returns the entries before the first damage. Their numbers rise. Those from the first event
// on are complete. Without a valid header it returns no entries, and the first number 1.
func parse(data []byte) contents {
	c := contents{first: 1}
	if len(data) < headerSize || string(data[:len(magic)]) != magic {
		return c
	}
	first := binary.LittleEndian.Uint64(data[len(magic):])
	if first < 2 || first > 1<<62 { // 1 would be after position 0, see readCursor
		return c
	}
	c.first, c.size = first, headerSize
	for before := uint64(0); len(data)-int(c.size) >= headSize; {
		e := entry(data[c.size:])
		if !e.sane() || e.size() > int64(len(e)) {
			break
		}
		e = e[:e.size():e.size()]
		number := e.number()
		gap := number > c.first && number != before+1 && number > before
		if !e.valid() || number <= before || gap || number > 1<<62 {
			break
		}
		c.entries, c.size, before = append(c.entries, e), c.size+e.size(), number
	}
	return c
}

// readEntry reads the next entry. It reads only the head if the number is at most after.
func readEntry(r io.Reader, after uint64) (entry, error) {
	head := make(entry, headSize)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	if head.number() <= after || !head.sane() {
		return head, nil
	}
	e := append(make(entry, 0, head.size()), head...)[:head.size()]
	if _, err := io.ReadFull(r, e[headSize:]); err != nil {
		return nil, err
	}
	if !e.valid() {
		return nil, fmt.Errorf("event %d is damaged", head.number())
	}
	return e, nil
}
