package podyaml

import (
	"fmt"
	"reflect"
	"regexp"
	"strings"

	"berth/internal/nearest"
)

var (
	unknownField = regexp.MustCompile(`^unknown field "(.+)"$`)
	element      = regexp.MustCompile(`\[\d+\]`)
)

// explainField adds the nearest name of a field to the decoder's error about an unknown one. into
// is the type that the object was decoded to.
func explainField(message string, into reflect.Type) string {
	found := unknownField.FindStringSubmatch(message)
	if found == nil {
		return message
	}
	steps := strings.Split(element.ReplaceAllString(found[1], ""), ".")
	t := indirect(into)
	for _, step := range steps[:len(steps)-1] {
		next := fieldType(t, step)
		if next == nil {
			return message // a key with a dot
		}
		t = indirect(next)
	}
	name := steps[len(steps)-1]
	best, least := "", 1+len(name)/2 // a name that is further away does not help
	for _, known := range fieldNames(t) {
		if d := nearest.Distance(strings.ToLower(name), strings.ToLower(known)); d < least {
			best, least = known, d
		}
	}
	if best == "" {
		return message
	}
	return fmt.Sprintf("%s, did you mean %s?", message, best)
}

// indirect returns the type of the objects in pointers and lists.
func indirect(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	return t
}

// fieldNames returns the JSON names of a struct's fields.
func fieldNames(t reflect.Type) (names []string) {
	if t.Kind() != reflect.Struct {
		return nil
	}
	for i := range t.NumField() {
		tag, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
		switch {
		case tag == "" && t.Field(i).Anonymous:
			names = append(names, fieldNames(indirect(t.Field(i).Type))...)
		case tag != "" && tag != "-":
			names = append(names, tag)
		}
	}
	return names
}
