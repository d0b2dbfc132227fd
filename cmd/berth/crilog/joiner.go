package crilog

// maxLine bounds how much of a line the joiner keeps, in bytes, before it returns a part. A
// container that never writes a newline must not exhaust memory.
const maxLine = 1 << 20

// joiner joins partial records, separately for each stream.
type joiner struct{ open [2]*Record }

func slot(s Stream) int {
	if s == Stderr {
		return 1
	}
	return 0
}

// add adds a record and returns the line once it is complete. It returns a line longer than maxLine
// in parts, all but the last marked Partial. The result does not share memory with r.
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

// flush returns incomplete lines, stdout first, after the writer has ended.
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
