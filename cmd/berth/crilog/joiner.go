package crilog

// maxLine is how much of one line the joiner keeps before it gives the line out
// in pieces: a container that never writes a newline must not fill our memory.
const maxLine = 1 << 20

// joiner puts partial records together, each stream for itself.
type joiner struct{ open [2]*Record }

func slot(s Stream) int {
	if s == Stderr {
		return 1
	}
	return 0
}

// add takes the next record and returns a line once it is complete. A line
// longer than maxLine comes out in pieces, all but the last marked Partial. The
// result does not share memory with r.
func (j *joiner) add(r Record) (Record, bool) {
	at := slot(r.Stream)
	if j.open[at] == nil {
		j.open[at] = &Record{Time: r.Time, Stream: r.Stream}
	}
	line := j.open[at]
	line.Content = append(line.Content, r.Content...)
	line.Partial = r.Partial
	if r.Partial && len(line.Content) < maxLine {
		return Record{}, false
	}
	j.open[at] = nil
	return *line, true
}

// flush returns what waits for its end, stdout first: the writer is gone and
// no end will come.
func (j *joiner) flush() []Record {
	var out []Record
	for i, r := range j.open {
		if r != nil {
			out = append(out, *r)
			j.open[i] = nil
		}
	}
	return out
}
