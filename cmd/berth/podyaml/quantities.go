package podyaml

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

var quantityType = reflect.TypeFor[resource.Quantity]()

// badQuantities returns the malformed quantities below path. t is the type that content will be
// decoded to. The decoder's own error has neither path nor value.
func badQuantities(path string, content any, t reflect.Type) (out []Problem) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if text, ok := content.(string); ok && t == quantityType {
		if _, err := resource.ParseQuantity(text); err != nil {
			return []Problem{{path, fmt.Sprintf("%q is not a quantity; write for example 500m, 2 or 64Mi", text)}}
		}
	}
	switch v := content.(type) {
	case map[string]any:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			if inner := fieldType(t, name); inner != nil {
				out = append(out, badQuantities(join(path, name), v[name], inner)...)
			}
		}
	case []any:
		for i, element := range v {
			if t.Kind() == reflect.Slice {
				out = append(out, badQuantities(index(path, i), element, t.Elem())...)
			}
		}
	}
	return out
}

// fieldType returns the type of a struct's field by its JSON name, or of a map's values, or nil.
func fieldType(t reflect.Type, name string) reflect.Type {
	if t.Kind() == reflect.Map {
		return t.Elem()
	}
	for i := 0; t.Kind() == reflect.Struct && i < t.NumField(); i++ {
		field := t.Field(i)
		tag, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		if tag == name {
			return field.Type
		}
		if tag == "" && field.Anonymous {
			if inner := fieldType(field.Type, name); inner != nil {
				return inner
			}
		}
	}
	return nil
}
