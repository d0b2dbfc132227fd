package podyaml

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

var quantityType = reflect.TypeFor[resource.Quantity]()

// badQuantities returns the malformed quantities of an object by their paths. The decoder's own
// error has neither path nor value.
func badQuantities(fields map[string]any, into any) []Problem {
	var out []Problem
	findQuantities("", fields, reflect.TypeOf(into), &out)
	return out
}

// findQuantities visits the values that the decoder would store in fields of type Quantity.
func findQuantities(path string, content any, t reflect.Type, out *[]Problem) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == quantityType {
		if text, ok := content.(string); ok {
			if _, err := resource.ParseQuantity(text); err != nil {
				*out = append(*out, Problem{path, fmt.Sprintf("%q is not a quantity; write for example %s", text, validQuantity(path, text))})
			}
		}
		return
	}
	switch v := content.(type) {
	case map[string]any:
		names := make([]string, 0, len(v))
		for name := range v {
			names = append(names, name)
		}
		slices.Sort(names)
		for _, name := range names {
			if inner := fieldType(t, name); inner != nil {
				findQuantities(join(path, name), v[name], inner, out)
			}
		}
	case []any:
		if t.Kind() != reflect.Slice {
			return
		}
		for i, element := range v {
			findQuantities(index(path, i), element, t.Elem(), out)
		}
	}
}

// fieldType returns the type of a struct's field by its JSON name, or of a map's values, or nil.
func fieldType(t reflect.Type, name string) reflect.Type {
	switch t.Kind() {
	case reflect.Map:
		return t.Elem()
	case reflect.Struct:
		for i := range t.NumField() {
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
	}
	return nil
}

// validQuantity returns an example that resembles a malformed quantity: 64Mi for 64Mb. The path
// says whether it is a number of CPUs.
func validQuantity(path, text string) string {
	text = strings.TrimSpace(text)
	end := strings.IndexFunc(text, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(text)
	}
	number, unit := text[:end], strings.ToUpper(strings.TrimSpace(text[end:]))
	switch {
	case strings.HasSuffix(path, ".cpu"):
		return "500m or 2"
	case number == "":
		return "64Mi"
	case unit != "" && strings.Contains("KMGTPE", unit[:1]):
		return number + unit[:1] + "i"
	}
	return number + " or " + number + "Mi"
}
