package operator

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// filter decides by one KEY=VALUE of --filter whether an object is listed.
type filter[R any] func(r R, value string) (bool, error)

// filters are the keys of a list's --filter.
type filters[R any] map[string]filter[R]

// keys lists the keys for a help text.
func (f filters[R]) keys() string { return strings.Join(slices.Sorted(maps.Keys(f)), ", ") }

// apply returns the rows that match all filters.
func (f filters[R]) apply(rows []R, given []string) ([]R, error) {
	for _, text := range given {
		key, value, ok := strings.Cut(text, "=")
		match := f[key]
		if !ok || match == nil {
			return nil, fmt.Errorf("--filter %q: want KEY=VALUE with one of the keys %s", text, f.keys())
		}
		var kept []R
		for _, r := range rows {
			matches, err := match(r, value)
			if err != nil {
				return nil, fmt.Errorf("--filter %q: %w", text, err)
			}
			if matches {
				kept = append(kept, r)
			}
		}
		rows = kept
	}
	return rows, nil
}

// byPattern matches a text against a regular expression, as docker and crictl match names.
func byPattern[R any](text func(R) string) filter[R] {
	return func(r R, value string) (bool, error) { return regexp.MatchString(value, text(r)) }
}

// byPatternOfAny matches one of several texts, as byPattern does.
func byPatternOfAny[R any](texts func(R) []string) filter[R] {
	return func(r R, value string) (bool, error) {
		pattern, err := regexp.Compile(value)
		return err == nil && slices.ContainsFunc(texts(r), pattern.MatchString), err
	}
}

// byWord matches a whole word in upper or lower case.
func byWord[R any](text func(R) string) filter[R] {
	return func(r R, value string) (bool, error) { return strings.EqualFold(text(r), value), nil }
}

// byPrefix matches the beginning of an ID.
func byPrefix[R any](id func(R) string) filter[R] {
	return func(r R, value string) (bool, error) {
		return strings.HasPrefix(strings.TrimPrefix(id(r), "sha256:"), strings.TrimPrefix(value, "sha256:")), nil
	}
}

// byLabel matches NAME or NAME=VALUE.
func byLabel[R any](labels func(R) map[string]string) filter[R] {
	return func(r R, value string) (bool, error) {
		name, want, hasValue := strings.Cut(value, "=")
		got, ok := labels(r)[name]
		return ok && (!hasValue || got == want), nil
	}
}
