// Program gpu imports a backend with GPUs, and so carries the kernels, once.
package main

import (
	"fmt"

	"github.com/symmem/symmem"
	_ "github.com/symmem/symmem/backend/all"
	"github.com/symmem/symmem/kernels"
)

func main() { _, _ = fmt.Println(symmem.Open, kernels.NewAllReduce) }
