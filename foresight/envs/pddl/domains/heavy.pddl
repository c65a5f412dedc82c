; Items are stacked in a box, each on a heavier one.
(define (domain heavy)
  (:requirements :strips :typing)
  (:types item - object)
  (:predicates
    (box-empty)
    (unpacked ?i - item)
    (packed ?i - item)
    (nothing-above ?i - item)
    (heavier ?i - item ?j - item))
  (:action pack-first
    :parameters (?i - item)
    :precondition (and (box-empty) (unpacked ?i))
    :effect (and (packed ?i) (nothing-above ?i) (not (unpacked ?i)) (not (box-empty))))
  (:action stack
    :parameters (?bottom - item ?top - item)
    :precondition (and (packed ?bottom) (nothing-above ?bottom) (unpacked ?top) (heavier ?bottom ?top))
    :effect (and (packed ?top) (nothing-above ?top) (not (nothing-above ?bottom)) (not (unpacked ?top)))))
