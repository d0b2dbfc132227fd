package config

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// Migrate rewrites a configuration file, so that keys of release 0.2 become keys in tables. A
// comment stays before the key that follows it. The result has the same options as the file.
func Migrate(name string, content []byte) (string, error) {
	before, err := Parse(name, content)
	if err != nil {
		return "", err
	}
	text := rewrite(string(content))
	after, err := Parse(name, []byte(text))
	if err != nil {
		return "", fmt.Errorf("rewrite %s: %w", name, err)
	}
	if !reflect.DeepEqual(before, after) {
		return "", fmt.Errorf("rewrite %s: the result would set other values; write it by hand", name)
	}
	return text, nil
}

// segment is a key with its value, or a table header, and the comments in front of it.
type segment struct {
	key      string // full key in the file
	comments []string
	lines    []string
}

// rewrite sorts the keys of a valid file into their tables.
func rewrite(content string) string {
	header, all, end := segments(content)
	byTable := map[string][]segment{} // assignments, by table
	headers := map[string]segment{}
	for _, s := range all {
		if strings.HasPrefix(strings.TrimSpace(s.lines[0]), "[") {
			headers[s.key] = s
			continue
		}
		table, _ := cut(s.key)
		i := slices.IndexFunc(options(), func(o option) bool { return o.Key == s.key || o.Old == s.key })
		if i >= 0 {
			o := options()[i]
			var key string
			table, key = o.group()
			s.lines[0] = assigned.ReplaceAllString(s.lines[0], key+" =")
		} else if slices.Contains(groups(), s.key) { // an inline table
			table = s.key
			s.lines = append([]string{}, inlineLines(content, s.key)...)
		}
		byTable[table] = append(byTable[table], s)
	}
	out := header
	for _, table := range tablesOf(byTable, headers) {
		if len(out) > 0 && out[len(out)-1] != "" {
			out = append(out, "")
		}
		if table != "" {
			out = append(out, trimBlank(headers[table].comments)...)
			out = append(out, "["+table+"]")
		}
		for i, s := range byTable[table] {
			if i == 0 {
				s.comments = trimBlank(s.comments)
			}
			out = append(append(out, s.comments...), s.lines...)
		}
	}
	if end = trimBlank(end); len(end) > 0 {
		out = append(append(out, ""), end...)
	}
	return strings.TrimLeft(strings.Join(out, "\n"), "\n") + "\n"
}

// assigned matches the key at the beginning of an assignment.
var assigned = regexp.MustCompile(`^\s*["']?[\w.-]+["']?\s*=`)

// inlineLines returns the options of an inline table as assignments.
func inlineLines(content, table string) []string {
	c, err := Parse("", []byte(content))
	if err != nil {
		return nil
	}
	var lines []string
	defaults := Default()
	for _, o := range optionsIn(table) {
		if !reflect.DeepEqual(o.value(fields(c)).Interface(), o.value(fields(defaults)).Interface()) {
			lines = append(lines, o.assignment(c))
		}
	}
	return lines
}

// tablesOf returns the tables of the result in the order of the options. Tables that users name
// come last.
func tablesOf(assignments map[string][]segment, headers map[string]segment) []string {
	seen := maps.Clone(map[string]bool{"": len(assignments[""]) > 0})
	for t := range assignments {
		seen[t] = true
	}
	for t := range headers {
		seen[t] = seen[t] || !isGroup(t)
	}
	var all []string
	for t, is := range seen {
		if is {
			all = append(all, t)
		}
	}
	order := groups()
	rank := func(t string) int {
		if i := slices.Index(order, t); i >= 0 {
			return i
		}
		return len(order)
	}
	slices.SortFunc(all, func(a, b string) int { return cmp.Or(cmp.Compare(rank(a), rank(b)), strings.Compare(a, b)) })
	return all
}

// segments splits a file. header has the comments at its beginning, if an empty line separates them
// from the first key. end has the comments after the last key.
func segments(content string) (header []string, all []segment, end []string) {
	rest := strings.Split(strings.TrimRight(content, "\n"), "\n")
	type place struct {
		key  string
		line int
	}
	var places []place
	for key, line := range lines([]byte(content)) {
		places = append(places, place{key, line})
	}
	slices.SortFunc(places, func(a, b place) int { return cmp.Compare(a.line, b.line) })
	next := 0 // first line that belongs to no segment
	for i, p := range places {
		comments := rest[next : p.line-1]
		if i == 0 {
			if blank := lastBlank(comments); blank >= 0 {
				header, comments = comments[:blank], comments[blank+1:]
			}
		}
		stop := len(rest)
		if i+1 < len(places) {
			stop = places[i+1].line - 1
		}
		for stop > p.line && isComment(rest[stop-1]) {
			stop--
		}
		all = append(all, segment{p.key, slices.Clone(comments), slices.Clone(rest[p.line-1 : stop])})
		next = stop
	}
	return slices.Clone(header), all, slices.Clone(rest[next:])
}

// trimBlank removes empty lines at the beginning and at the end.
func trimBlank(lines []string) []string {
	for len(lines) > 0 && strings.TrimSpace(lines[0]) == "" {
		lines = lines[1:]
	}
	for len(lines) > 0 && strings.TrimSpace(lines[len(lines)-1]) == "" {
		lines = lines[:len(lines)-1]
	}
	return lines
}

func isComment(line string) bool {
	line = strings.TrimSpace(line)
	return line == "" || line[0] == '#'
}

func lastBlank(lines []string) int {
	for i, line := range slices.Backward(lines) {
		if strings.TrimSpace(line) == "" {
			return i
		}
	}
	return -1
}
