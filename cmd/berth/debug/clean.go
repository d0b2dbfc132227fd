package debug

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// clean is content that may be published. Only asIs and the other functions of this file create it
// from text of the node.
type clean []byte

// asIs is for content that the kernel, the distribution or this program has written as numbers and
// fixed words.
func asIs(content []byte) (clean, error) { return content, nil }

// free cleans free text.
func (m *masker) free(content []byte) (clean, error) { return clean(m.text(string(content))), nil }

// mounts cleans a list of mounts, whose options stand between commas.
func (m *masker) mounts(content []byte) (clean, error) {
	return m.free(bytes.ReplaceAll(content, []byte(","), []byte(", ")))
}

// secretKey matches the names of values that are always removed.
var secretKey = regexp.MustCompile(`(?i)pass|psk|secret|token|credential|pwd|key|auth|cookie|signature|pin$`)

// document cleans a JSON document. It treats strings and keys as free text.
func (m *masker) document(content []byte) (clean, error) {
	decoder := json.NewDecoder(bytes.NewReader(content))
	decoder.UseNumber()
	var v any
	if err := decoder.Decode(&v); err != nil {
		return m.free(content)
	}
	return indented(m.tree(v, isShown))
}

// isShown reports whether a value may be shown, because its last key names no secret.
func isShown(keys []string) bool { return !secretKey.MatchString(keys[len(keys)-1]) }

func indented(v any) (clean, error) { return json.MarshalIndent(v, "", "  ") }

// tree cleans a decoded document. It removes the values below keys that are not shown, each given
// with the keys above it.
func (m *masker) tree(v any, shown func(keys []string) bool) any {
	var walk func(v any, keys []string, hidden bool) any
	walk = func(v any, keys []string, hidden bool) any {
		switch v := v.(type) {
		case map[string]any:
			masked := make(map[string]any, len(v))
			for key, value := range v {
				below := append(slices.Clip(keys), key)
				masked[m.text(key)] = walk(value, below, hidden || !shown(below))
			}
			return masked
		case []any:
			for i := range v {
				v[i] = walk(v[i], keys, hidden)
			}
			return v
		case string:
			if !hidden {
				return m.phrase(v)
			}
		}
		if hidden {
			return m.secret(fmt.Sprint(v))
		}
		return v
	}
	return walk(v, nil, false)
}

// phrase cleans a text. It keeps the whole text if the programs contain it.
func (m *masker) phrase(s string) string {
	cleaned := m.text(s)
	if cleaned != s && m.literal(s) {
		return s
	}
	return cleaned
}

// hosts cleans a hosts.toml. It keeps the names of hosts, and removes HTTP headers are removed.
func (m *masker) hosts(content []byte) (clean, error) {
	var v map[string]any
	if err := toml.Unmarshal(content, &v); err != nil {
		return nil, fmt.Errorf("no valid TOML: %w", err)
	}
	if server, ok := v["server"].(string); ok {
		m = m.withHost(server)
	}
	hosts, _ := v["host"].(map[string]any)
	for name := range hosts {
		m = m.withHost(name)
	}
	return toml.Marshal(m.tree(v, func(keys []string) bool {
		return !slices.Contains(keys, "header") && isShown(keys)
	}))
}

var hostOfURL = regexp.MustCompile(`^(?:https?://)?(?:[^/]*@)?([a-zA-Z0-9.-]{1,253}(?::[0-9]{1,5})?)(?:/|$)`)

// withHost returns a masker that knows the host of a URL.
func (m *masker) withHost(url string) *masker {
	if found := hostOfURL.FindStringSubmatch(url); found != nil {
		return m.with(found[1])
	}
	return m
}

// cniNames are the keys of well-known CNI plugins whose values are names.
var (
	cniNames   = setOf("name", "type", "bridge", "master", "cniVersion", "cniVersions", "mode", "ifName")
	identifier = regexp.MustCompile(`^[A-Za-z0-9._-]{1,63}$`)
)

// network cleans a CNI configuration, whose names are known.
func (m *masker) network(content []byte) (clean, error) {
	var v any
	if err := json.Unmarshal(content, &v); err != nil {
		return nil, fmt.Errorf("no valid JSON: %w", err)
	}
	return indented(m.with(namesIn(v)...).tree(v, isShown))
}

// namesIn returns the names in a CNI configuration.
func namesIn(v any) []string {
	var names []string
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if s, ok := value.(string); ok && cniNames[key] && identifier.MatchString(s) {
				names = append(names, s)
			} else {
				names = append(names, namesIn(value)...)
			}
		}
	case []any:
		for _, value := range v {
			names = append(names, namesIn(value)...)
		}
	}
	return names
}

// stackLine matches the lines of a goroutine's stack: functions with addresses, files with lines.
var stackLine = regexp.MustCompile(`^(` +
	`(created by )?[\w/.-]+\.[\w.()*\[\]·,-]+(\([0-9a-fx,.?{} ]*\)| in goroutine [0-9]+)|` +
	`\t/?[\w./@+-]+\.(go|s):[0-9]+( \+0x[0-9a-f]+)?|` +
	`\.\.\.additional frames elided\.\.\.|)$`)

// stacks cleans the stacks of goroutines. In other lines, such as "goroutine 1 [select]:", only
// known words stay.
func (m *masker) stacks(content []byte) (clean, error) {
	var b bytes.Buffer
	for line := range strings.Lines(string(content)) {
		if !stackLine.MatchString(strings.TrimSuffix(line, "\n")) {
			line = m.text(line)
		}
		b.WriteString(line)
	}
	return b.Bytes(), nil
}

var (
	sample = regexp.MustCompile(`^([a-z_:][\w:]*)(\{.*\})? ([0-9.eE+-]+|NaN|[+-]Inf)$`)
	label  = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)
)

// samples cleans metrics in Prometheus' text format. It treats values of labels as free text.
func (m *masker) samples(content []byte) (clean, error) {
	var b bytes.Buffer
	for line := range strings.Lines(string(content)) {
		found := sample.FindStringSubmatch(strings.TrimSuffix(line, "\n"))
		if found == nil {
			if strings.HasPrefix(line, "# TYPE ") {
				b.WriteString(line)
			}
			continue
		}
		b.WriteString(found[1])
		for i, l := range label.FindAllStringSubmatch(found[2], -1) {
			fmt.Fprintf(&b, "%c%s=\"%s\"", "{,"[min(i, 1)], l[1], m.text(l[2]))
		}
		if found[2] != "" {
			b.WriteByte('}')
		}
		b.WriteString(" " + found[3] + "\n")
	}
	return b.Bytes(), nil
}

var (
	// journal matches what journalctl writes in front of a message.
	journal = regexp.MustCompile(`^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+[+-][0-9:]+ [\w.-]+ [\w.-]+\[[0-9]+\]: `)
	field   = regexp.MustCompile(`^([\w.]+)=("(?:[^"\\]|\\.)*"|[^\s"]*)(?: |$)`)

	id         = regexp.MustCompile(`^[0-9a-f]{12,64}$`)
	objectName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{0,252}$`)
	imageName  = regexp.MustCompile(`^[a-z0-9][\w./:-]{0,255}(@sha256:[0-9a-f]{64})?$`)

	// shownFields are the fields of log lines that always have one form.
	shownFields = map[string]*regexp.Regexp{
		"pod": id, "container": id, "exec": id, "podName": objectName, "namespace": objectName, "containerName": objectName,
		"image": imageName, "layer": digest, "blob": digest, "chain": digest,
	}
)

// logLines cleans the daemon's log. A field that has its known form is shown. Everything else is
// treated as free text.
func (m *masker) logLines(content []byte) (clean, error) {
	lines := make([][]logField, 0, bytes.Count(content, []byte("\n"))+1)
	names := map[string]bool{}
	for line := range strings.Lines(string(content)) {
		fields := parseLog(strings.TrimSuffix(line, "\n"))
		for _, f := range fields {
			if f.known() {
				names[f.value] = true
			}
		}
		lines = append(lines, fields)
	}
	m = m.with(slices.Collect(maps.Keys(names))...)
	var b bytes.Buffer
	for _, fields := range lines {
		for i, f := range fields {
			if i > 0 {
				b.WriteByte(' ')
			}
			b.WriteString(m.logField(f))
		}
		b.WriteByte('\n')
	}
	return b.Bytes(), nil
}

// logField is a field of a log line, or text without a key.
type logField struct{ key, value string }

func (f logField) known() bool {
	form := shownFields[f.key]
	return form != nil && form.MatchString(f.value)
}

// parseLog returns the fields of a line in either of the daemon's formats.
func parseLog(line string) []logField {
	prefix := journal.FindString(line)
	rest := line[len(prefix):]
	var fields []logField
	if prefix != "" {
		fields = append(fields, logField{value: strings.TrimSuffix(prefix, " ")})
	}
	var object map[string]any
	if json.Unmarshal([]byte(rest), &object) == nil {
		for _, key := range slices.Sorted(maps.Keys(object)) {
			fields = append(fields, logField{key, fmt.Sprint(object[key])})
		}
		return fields
	}
	for rest != "" {
		found := field.FindStringSubmatch(rest)
		if found == nil {
			return append(fields, logField{value: rest})
		}
		value := found[2]
		if text, err := strconv.Unquote(value); err == nil {
			value = text
		}
		fields = append(fields, logField{found[1], value})
		rest = rest[len(found[0]):]
	}
	return fields
}

func (m *masker) logField(f logField) string {
	if f.key == "" && (journal.MatchString(f.value+" ") || stackLine.MatchString(f.value)) {
		return f.value
	}
	value := f.value
	switch {
	case f.known():
	case f.key == "msg":
		value = m.phrase(value)
	default:
		value = m.text(value)
	}
	if secretKey.MatchString(f.key) {
		value = m.secret(f.value)
	}
	if f.key == "" {
		return value
	}
	if value == "" || strings.ContainsAny(value, " \"=\n\t") {
		value = strconv.Quote(value)
	}
	return m.text(f.key) + "=" + value
}

func setOf(all ...string) map[string]bool {
	set := make(map[string]bool, len(all))
	for _, s := range all {
		set[s] = true
	}
	return set
}
